"""What has to be on disk beside a peer's own rows, as tensors and a few numbers, for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor

from flower_privdec.pushsum.share_protocol import LAST, Durable, FrozenShare, PeerLink

Facts = dict[str, Any]
FROZEN = "frozen."  # before the names of tensors
COUNTERS = [each.name for each in fields(PeerLink) if each.name != "frozen"]
OF_SHARE = ["incarnation", "addressed", "number", "life", "round_index"]


def pack(durable: Durable[Tensor]) -> tuple[Facts, dict[str, Tensor]]:
    """Return all but the mass: what JSON can hold, and tensors; values that several shares have in common come once."""
    tensors: dict[str, Tensor] = {}
    known: dict[int, int] = {}
    links = {}
    for neighbor, link in durable.links.items():
        facts: Facts = {name: getattr(link, name) for name in COUNTERS} | {"frozen": None}
        if (share := link.frozen) is not None:
            place = known.setdefault(id(share.values), len(known))
            tensors |= {f"{FROZEN}{place}.{name}": value for name, value in share.values.items()}
            facts["frozen"] = {name: getattr(share, name) for name in OF_SHARE} | {"values": place}
        links[str(neighbor)] = facts
    own = {"incarnation": durable.incarnation, "round_index": durable.round_index}
    return own | {"links": links}, tensors


def unpack(peer: int, facts: Facts, tensors: Mapping[str, Tensor], mass: Mapping[str, Tensor]) -> Durable[Tensor]:
    """Return what was packed, bit for bit.

    Args:
        mass: of the peer, in the order in which its parts are sent.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is not what `pack` returns, saying why.
    """
    links: dict[int, PeerLink[Tensor]] = {}
    shared: dict[int, dict[str, Tensor]] = {}
    for neighbor, link in facts["links"].items():
        counters = {name: _count(name, link[name]) for name in COUNTERS}
        frozen = link["frozen"] and _share(peer, int(neighbor), link["frozen"], tensors, shared, list(mass))
        if frozen is not None and (frozen.number, frozen.life) != (counters["sent"], counters["sent_life"]):
            raise ValueError(f"the share for peer {neighbor} is not the last one sent")
        links[int(neighbor)] = PeerLink(**counters, frozen=frozen)
    incarnation, round_index = (_count(name, facts[name]) for name in ("incarnation", "round_index"))
    return Durable(incarnation, round_index, mass, links)


def _share(
    peer: int,
    neighbor: int,
    facts: Facts,
    tensors: Mapping[str, Tensor],
    shared: dict[int, dict[str, Tensor]],
    names: list[str],
) -> FrozenShare[Tensor]:
    place = _count("values", facts["values"])
    values = shared.setdefault(place, {name: tensors[f"{FROZEN}{place}.{name}"] for name in names})
    return FrozenShare(peer, neighbor, **{name: _count(name, facts[name]) for name in OF_SHARE}, values=values)


def _count(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value <= LAST:
        raise ValueError(f"{name}={value!r} must be a number of at most 64 bits")
    return value
