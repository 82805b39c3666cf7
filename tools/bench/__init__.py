"""The benchmark behind `privdec bench`: the engine beside a plain loop over peers, in one process."""

from tools.bench.whole import main, measure

__all__ = ["main", "measure"]
