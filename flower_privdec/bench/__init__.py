"""The benchmark behind `privdec bench`: the engine beside a plain loop over peers, in one process."""
