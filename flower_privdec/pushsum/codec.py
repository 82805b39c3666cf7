"""Wire codecs: how rows of numbers look on the wire, and tensors as the values of the push-sum protocol."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields
from typing import Any, Protocol

import torch
from torch import Tensor

from flower_privdec.common.user_code import load_own
from flower_privdec.core import State
from flower_privdec.errors import ScenarioError
from flower_privdec.pushsum.exactly_once import LAST, Durable, Edge, FrozenShare
from flower_privdec.rows.tensors import all_finite

AT_ONCE = 2**17  # numbers whose sum stays in cache
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
Facts = dict[str, Any]
FROZEN = "frozen."  # before the names of tensors
COUNTERS = [field.name for field in fields(Edge) if field.name != "frozen"]
OF_SHARE = ["incarnation", "addressed", "number", "boot", "round_index"]


class WireCodec(Protocol):
    """How rows look on the wire.

    What rounding takes away stays in the sender's mass: `PushSumProtocol` subtracts `decode(encode(part))`, which is
    what the receiver adds, so that Σ x and Σ w over all peers and shares in flight do not change, whatever a codec
    does.
    """

    def encode(self, row: Tensor) -> Tensor:
        """Return a row as it is sent: float16, bfloat16, float32, float64 or uint8, of up to four axes.

        Its shape and type must follow from the row's shape and type alone.
        """

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        """Return the row that was sent, of another row's shape and type; not finite where no row was encoded so."""


class Cast:
    """Sends rows as numbers of one type; what the type cannot hold is rounded."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, row: Tensor) -> Tensor:
        """See WireCodec."""
        return row.to(self._dtype)

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        """See WireCodec."""
        return sent.to(like)


class Exact:
    """Sends rows as they are."""

    def encode(self, row: Tensor) -> Tensor:
        """See WireCodec."""
        return row

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        """See WireCodec."""
        return sent.to(like)


CODECS: dict[str, WireCodec] = {"exact": Exact(), "float32": Cast(torch.float32), "bfloat16": Cast(torch.bfloat16)}


def wire_codec(name: str) -> WireCodec:
    """Return the wire codec of a name, or the user's own, `package.module:Name`.

    Raises:
        ScenarioError: there is none.
    """
    if name in CODECS:
        return CODECS[name]
    if ":" not in name:
        raise ScenarioError(
            f"network.codec={name!r} must be one of {', '.join(CODECS)}, or your own, as package.module:Name",
            code="network.codec",
        )
    methods = ("encode", "decode")
    own = load_own(
        name,
        "network.codec",
        accepts=lambda part: all(hasattr(part, method) for method in methods),
        must_be="a class with the methods encode and decode",
    )
    codec: WireCodec = own()
    return codec


class RowMass(MutableMapping[str, Tensor]):
    """Some named rows of a state of one peer: `mass["x"]` is [d], `mass["w"]` has no axis.

    What is set is written into the row, which stays where it lies; steps may put other rows in their place.

    Args:
        state: of one peer.
        names: of the rows that an exchange mixes.
    """

    def __init__(self, state: State, names: Iterable[str]) -> None:
        self._state, self._names = state, tuple(names)

    def __getitem__(self, name: str) -> Tensor:
        return self._state.rows[name][0]

    def __setitem__(self, name: str, value: Tensor) -> None:
        row = self._state.rows[name][0]
        if value.data_ptr() != row.data_ptr():
            row.copy_(value)

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"row {name!r} belongs to the algorithm and must stay")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class TensorArithmetic:
    """Rows on any device, of which parts leave as a wire codec encodes them; numbers without an axis leave as they are.

    In floating point each addition rounds, as in any mixing; the number subtracted here is the one added there.
    """

    def __init__(self, codec: WireCodec = CODECS["exact"]) -> None:
        self._codec = codec

    @property
    def is_exact(self) -> bool:
        """Whether rows are sent as they are."""
        return isinstance(self._codec, Exact)

    def encode(self, row: Tensor) -> Tensor:
        """Return a row as it is sent, which later changes of the row do not affect where it is another type's."""
        return self._codec.encode(row) if row.ndim else row

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        """Return the row that was sent."""
        return self._codec.decode(sent, like) if like.ndim else sent.to(like)

    def part(self, value: Tensor, weight: float) -> Tensor:
        """See Arithmetic."""
        return self.encode(value * weight)

    def subtract(self, value: Tensor, part: Tensor) -> Tensor:
        """See Arithmetic; in place."""
        return value.sub_(self.decode(part, value))

    def add(self, value: Tensor, part: Tensor) -> Tensor:
        """See Arithmetic; in place."""
        return value.add_(self.decode(part, value))

    def nothing(self, value: Tensor) -> Tensor:
        """See Arithmetic."""
        return torch.zeros_like(value)

    def copy(self, value: Tensor) -> Tensor:
        """See Arithmetic."""
        return value.clone()

    def same(self, value: Tensor, part: Tensor) -> bool:
        """See Arithmetic; -0 is not 0 here."""
        return value.dtype == part.dtype and value.shape == part.shape and torch.equal(_bits(value), _bits(part))

    def fits(self, value: Tensor, part: Tensor) -> bool:
        """See Arithmetic."""
        pairs = zip(value.reshape(-1).split(AT_ONCE), self.decode(part, value).reshape(-1).split(AT_ONCE), strict=True)
        return all(all_finite(ours + theirs) for ours, theirs in pairs)


def _bits(value: Tensor) -> Tensor:
    return value.reshape(-1).view(BITS[value.element_size()])


# --- what has to be on disk beside a peer's own rows, for a checkpoint ---


def pack(durable: Durable[Tensor]) -> tuple[Facts, dict[str, Tensor]]:
    """Return all but the mass: what JSON can hold, and tensors; values that several shares have in common come once."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[int, int] = {}
    edges = {}
    for neighbor, edge in durable.edges.items():
        shares = []
        for share in edge.frozen:
            number = numbers.setdefault(id(share.values), len(numbers))
            tensors |= {f"{FROZEN}{number}.{name}": value for name, value in share.values.items()}
            shares.append({name: getattr(share, name) for name in OF_SHARE} | {"values": number})
        edges[str(neighbor)] = {name: getattr(edge, name) for name in COUNTERS} | {"frozen": shares}
    return {"incarnation": durable.incarnation, "round_index": durable.round_index, "edges": edges}, tensors


def unpack(peer: int, facts: Facts, tensors: Mapping[str, Tensor], mass: Mapping[str, Tensor]) -> Durable[Tensor]:
    """Return what was packed, bit for bit.

    Args:
        mass: of the peer, in the order in which its parts are sent.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is not what `pack` returns, with the reason.
    """
    edges: dict[int, Edge[Tensor]] = {}
    shared: dict[int, dict[str, Tensor]] = {}
    for neighbor, packed in facts["edges"].items():
        counters = {name: _count(name, packed[name]) for name in COUNTERS}
        frozen = []
        for share in packed["frozen"]:
            number = _count("values", share["values"])
            values = shared.setdefault(number, {name: tensors[f"{FROZEN}{number}.{name}"] for name in mass})
            numbers = {name: _count(name, share[name]) for name in OF_SHARE}
            frozen.append(FrozenShare(peer, int(neighbor), **numbers, values=values))
        if frozen and (frozen[-1].number, frozen[-1].boot) != (counters["sent"], counters["sent_boot"]):
            raise ValueError(f"the last share for peer {neighbor} is not the last one sent")
        edges[int(neighbor)] = Edge(**counters, frozen=tuple(frozen))
    return Durable(
        _count("incarnation", facts["incarnation"]), _count("round_index", facts["round_index"]), mass, edges
    )


def _count(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value <= LAST:
        raise ValueError(f"{name}={value!r} must be a number of at most 64 bits")
    return value
