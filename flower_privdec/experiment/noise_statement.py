"""Where a run's noise comes from, and what its summary and its warnings say about that."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from flower_privdec.experiment.run_key import EXACT, SEEDED, SYSTEM

MAY = "models may be published under this ε"
MUST_NOT = "models must not be published under this ε"

NOISE = {
    SEEDED: f"drawn from keys, which anyone who knows the data can derive: {MUST_NOT}",
    SYSTEM: f"of the operating system's generator: {MAY}",
    EXACT: f"of the operating system's generator, hardened (rounded exactly): {MAY}",
}

SALTED = (
    "{parts}: what code of one's own computes cannot be known, so noise and batches are drawn for this run only: "
    "running the scenario again draws other numbers, and a run that is resumed draws others, and pays for them, from "
    "its checkpoint on"
)


def noise_facts(sources: Collection[str]) -> dict[str, Any]:
    """Return what a summary states about the noise of peers, and whether their models may be published under their ε.

    Args:
        sources: the sources of all peers' noise, see `run_key.noise_source`.
    """
    texts = "; some peers': ".join(NOISE[source] for source in sorted(set(sources)))
    return {"noise": texts, "publishable": bool(sources) and SEEDED not in sources}
