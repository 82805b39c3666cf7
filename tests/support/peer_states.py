"""States of relayed peers, read from their folders."""

from __future__ import annotations

from pathlib import Path

from flower_privdec.peer.app_state import PeerState, load_state, state_path


def state_in(folder: Path, run: str) -> PeerState | None:
    """Return a peer's state of a run; None if its folder has none."""
    saved = load_state(state_path(folder, run))
    return None if saved is None else saved.state
