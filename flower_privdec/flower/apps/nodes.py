"""Finding the nodes of a run, and making a node's silence or failure an error."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from flower_privdec.errors import RunError
from flower_privdec.flower.apps.answers import PLACE
from flower_privdec.flower.launch.error_formatting import DEATHS

DIED = "its process has ended (killed, or out of memory); give it more memory or fewer peers, and resume the run"
QUERY_PLACE = "query.place"


def find_nodes(grid: Grid, patience: float = 300.0) -> list[int]:
    """Return the ids of all nodes, in the order of their partition ids.

    A node says in its node-config which partition it is and how many there are (in a simulation Flower
    sets both).

    Args:
        grid: where to look.
        patience: seconds to wait for nodes that are not there yet, and for their answers.

    Raises:
        RunError: when nodes are missing, do not answer, or claim the same partition.
    """
    deadline = time.monotonic() + patience
    partitions: dict[int, int] = {}
    wanted = 1
    while len(partitions) < wanted:
        new = sorted(set(grid.get_node_ids()) - set(partitions))
        if new:
            places = _ask_places(grid, new, deadline - time.monotonic())
            partitions |= {node: place for node, (place, _) in places.items()}
            wanted = max(total for _, total in places.values())
        elif time.monotonic() > deadline:
            raise RunError(f"{len(partitions)} of {wanted} SuperNodes are there after {patience:.0f} s; start them all")
        else:
            time.sleep(0.05)
    return _in_order(partitions, wanted)


def _ask_places(grid: Grid, nodes: list[int], timeout: float) -> dict[int, tuple[int, int]]:
    messages = [Message(RecordDict(), node, QUERY_PLACE) for node in nodes]
    replies = answered(grid.send_and_receive(messages, timeout=timeout), {node: f"SuperNode {node}" for node in nodes})
    places = {}
    for node, reply in replies.items():
        place = reply.content.config_records[PLACE]
        places[node] = (int(str(place["partition-id"])), int(str(place["num-partitions"])))
        if places[node][0] < 0 or places[node][1] < 1:
            raise RunError(
                f"SuperNode {node} does not say which partition it is; "
                "start it with --node-config 'partition-id=I num-partitions=N'"
            )
    return places


def _in_order(partitions: Mapping[int, int], total: int) -> list[int]:
    by_partition: dict[int, int] = {}
    for node, partition in partitions.items():
        if partition in by_partition:
            raise RunError(
                f"SuperNodes {by_partition[partition]} and {node} both claim partition {partition}; "
                "give each its own partition-id"
            )
        by_partition[partition] = node
    if sorted(by_partition) != list(range(total)):
        raise RunError(f"partition ids {sorted(by_partition)} must be 0 to {total - 1}, each once")
    return [by_partition[partition] for partition in range(total)]


def answered(replies: Iterable[Message], expected: Mapping[int, str]) -> dict[int, Message]:
    """Return the replies by node id, all of them.

    Args:
        replies: what came back.
        expected: what to call each node that was asked.

    Raises:
        RunError: when a node failed or did not answer; it names the node.
    """
    by_node = {}
    for reply in replies:
        node = reply.metadata.src_node_id
        if reply.has_error():
            raise RunError(f"{expected.get(node, node)} failed: {reason(reply.error.reason)}")
        by_node[node] = reply
    silent = [name for node, name in expected.items() if node not in by_node]
    if silent:
        raise RunError(f"no answer from {', '.join(silent)}; see the SuperNode's log")
    return by_node


def reason(text: str | None) -> str:
    """Return the last line of what a node says went wrong, without the traceback before it and Flower's wrapping."""
    wrapped = re.fullmatch(r"<class '([^']*)'>:<'(.*)'>", text or "", re.DOTALL)
    if wrapped and wrapped[1].removeprefix("ray.exceptions.") in DEATHS:
        return DIED
    lines = [line.strip() for line in (wrapped[2] if wrapped else text or "").splitlines() if line.strip()]
    return lines[-1].removeprefix("Exception ClientAppException occurred. Message: ") if lines else "unknown"
