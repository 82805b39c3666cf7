"""The benchmark behind `privdec bench`: the engine beside a plain loop over peers, in one process."""

from flower_privdec.bench.whole import main, measure

__all__ = ["main", "measure"]
