"""`privdec soak`: peers on this machine, faults all the time, and the invariants that are checked meanwhile."""

from tools.soak.soak import Soak, SoakedRun, Tally

__all__ = ["Soak", "SoakedRun", "Tally"]
