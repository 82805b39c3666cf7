"""Network address translation for the devices of a lab: they dial out, and nobody dials them.

What such a device sends leaves from one public address, at a port of its own for each connection. What comes to that
port from the other end of the connection goes to the device, and all else is dropped, as at a home or hospital router.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

TCP = 6
PORTS = range(20_000, 60_000)

End = tuple[bytes, int]  # an address of four bytes, and a port


class Nat:
    """The translation of some devices' packets.

    Args:
        public: the address that stands for each hidden device, by its own; both of four bytes.
    """

    def __init__(self, public: Mapping[bytes, bytes]) -> None:
        self._public = dict(public)
        self._outside: dict[tuple[End, End], int] = {}  # by a device's end and the other one, the public port
        self._inside: dict[tuple[End, End], End] = {}  # by the public end and the other one, the device's end
        self._ports: Iterator[int] = iter(PORTS)

    def forget(self) -> None:
        """Forget all connections, as a router that starts again; later ones get other ports."""
        self._outside = {}
        self._inside = {}

    def outgoing(self, packet: bytes) -> bytes | None:
        """Return what leaves for a packet of a device; None if it is dropped."""
        source, target = packet[12:16], packet[16:20]
        public = self._public.get(source)
        if public is None:
            return packet
        ends = _ends(packet)
        if ends is None:
            return None

        here, there = ends
        if ends not in self._outside:
            port = next(self._ports)
            self._outside[ends] = port
            self._inside[(public, port), there] = here
        return _rewritten(packet, (public, self._outside[ends]), (target, there[1]))

    def incoming(self, packet: bytes) -> bytes | None:
        """Return what arrives for a packet to anybody; None if it is dropped."""
        target = packet[16:20]
        if target in self._public:
            return None  # a hidden address means nothing outside
        if target not in self._public.values():
            return packet
        ends = _ends(packet)
        if ends is None:
            return None
        there, public = ends
        here = self._inside.get((public, there))
        if here is None:
            return None
        return _rewritten(packet, there, here)


def _ends(packet: bytes) -> tuple[End, End] | None:
    """Return both ends of a packet of TCP over IPv4; None if it is of something else, or a later fragment."""
    begin = 4 * (packet[0] & 15)
    is_whole = struct.unpack_from("!H", packet, 6)[0] & 0x1FFF == 0
    if packet[9] != TCP or not is_whole or len(packet) < begin + 20:
        return None
    source, target = struct.unpack_from("!HH", packet, begin)
    return (packet[12:16], source), (packet[16:20], target)


def _rewritten(packet: bytes, source: End, target: End) -> bytes:
    """Return a packet of TCP with other ends, under sums that are right."""
    begin = 4 * (packet[0] & 15)
    content = bytearray(packet)
    content[12:16] = source[0]
    content[16:20] = target[0]
    struct.pack_into("!HH", content, begin, source[1], target[1])

    struct.pack_into("!H", content, 10, 0)
    struct.pack_into("!H", content, 10, _sum(bytes(content[:begin])))
    struct.pack_into("!H", content, begin + 16, 0)
    segment = bytes(content[begin:])
    pseudo = source[0] + target[0] + struct.pack("!HH", TCP, len(segment))
    struct.pack_into("!H", content, begin + 16, _sum(pseudo + segment))
    return bytes(content)


def _sum(content: bytes) -> int:
    """Return the Internet checksum of some bytes."""
    if len(content) % 2:
        content += b"\0"
    total = int(sum(struct.unpack(f"!{len(content) // 2}H", content)))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
