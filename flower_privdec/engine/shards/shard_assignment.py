"""Which shard hosts which peers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flower_privdec.common.formatting import peer_ranges


@dataclass(frozen=True)
class Shards:
    """Peers dealt out in runs of consecutive ids, whose lengths differ by one at most.

    Attributes:
        ends: int64 [shards + 1], 0 and the first id behind each shard's peers.
    """

    ends: np.ndarray

    @classmethod
    def deal(cls, n_peers: int, count: int) -> Shards:
        """Deal peers out to `count` shards, of which there are no more than peers."""
        each, more = divmod(n_peers, count := min(count, n_peers))
        return cls(each * np.arange(count + 1) + np.minimum(np.arange(count + 1), more))

    def __len__(self) -> int:
        """Return how many shards there are."""
        return len(self.ends) - 1

    def peers(self, shard: int) -> np.ndarray:
        """Return the global ids of a shard's peers, int64 [m]."""
        return np.arange(self.ends[shard], self.ends[shard + 1])

    def of(self, peers: np.ndarray) -> np.ndarray:
        """Return the shard of each of some peers."""
        return np.searchsorted(self.ends, peers, side="right") - 1

    def name(self, shard: int) -> str:
        """Return what a message calls a shard."""
        return f"the shard of peers {peer_ranges(self.peers(shard).tolist())}"
