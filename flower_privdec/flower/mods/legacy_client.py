"""Apps with a `client_fn`: Flower's legacy interface, which most of its published baselines have.

Such an app has a NumPyClient or Client in place of functions for messages. Flower calls `fit(parameters, config)` of it
with what it finds in records of other names and other kinds. Here a peer's message is put into those records, and the
answer into the ones that a train or evaluate function would return. Arrays have no names there: they are given and
taken in the order of the model's.

How an app is recognised: Flower (1.41 to 1.43) makes the client, and then looks for the legacy records of its message.
That they are missing is the first thing to go wrong, before anything of the user's but the `client_fn` is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from flower_privdec.common.errors import RunError
from flower_privdec.flower.mods.peer_messages import numpy_arrays, record_of

ASKED = {"train": "fitins", "evaluate": "evaluateins"}  # how the records of a message begin, by its type
ANSWERED = {"train": "fitres", "evaluate": "evaluateres"}  # and those of its answer
EXAMPLES = "num_examples"

App = Callable[[Message, Context], Message]


_LEGACY: WeakSet[App] = WeakSet()  # apps that turned out to have a client_fn


def is_legacy(app: App) -> bool:
    """Return whether an app is known to have a `client_fn`."""
    return app in _LEGACY


def turns_out_legacy(app: App, raised: BaseException | None) -> bool:
    """Return whether an app has a `client_fn`, by what it raised at its first message; it is remembered."""
    looked_for = str(raised.args[:1]) if isinstance(raised, KeyError) else ""
    if any(looked_for.startswith(f"('{name}.") for name in ASKED.values()):
        _LEGACY.add(app)
    return is_legacy(app)


def legacy_request(kind: str, content: RecordDict, key: str) -> RecordDict:
    """Return a message's records as a legacy client is given them.

    Args:
        kind: the message's type, train or evaluate.
        content: with the model under `key`, and a ConfigRecord if there is one.

    Raises:
        RunError: the message is of another type.
    """
    if kind not in ASKED:
        raise RunError(f"an app with a client_fn has no function for {kind!r} messages", code="flower.legacy-client")

    # Its configs are one dict; a strategy sends one record of them.
    config: dict[str, Any] = {}
    for record in content.config_records.values():
        config |= dict(record)
    arrays = list(numpy_arrays(content.array_records[key]).values())
    name = ASKED[kind]
    return RecordDict({f"{name}.parameters": ArrayRecord(arrays), f"{name}.config": ConfigRecord(config)})


def modern_answer(kind: str, answer: RecordDict, given: ArrayRecord, key: str, weighted_by: str) -> RecordDict:
    """Return a legacy client's answer as a train or evaluate function would have it.

    Args:
        kind: the message's type, train or evaluate.
        answer: what the client returned, in Flower's records.
        given: the model that it was given, which has the arrays' names.
        key: under which the model stands.
        weighted_by: the key of the number of examples.

    Raises:
        RunError: the client says that it failed.
    """
    name = ANSWERED[kind]
    status = answer.config_records.get(f"{name}.status", ConfigRecord())
    if status.get("code", 0):
        raise RunError(f"its client answered with status {dict(status)}", code="flower.legacy-client")

    metrics: dict[str, Any] = {}
    for metric, value in answer.config_records.get(f"{name}.metrics", ConfigRecord()).items():
        if isinstance(value, int | float) and math.isfinite(value):
            metrics[metric] = value + 0  # a truth value is a number
    if kind == "evaluate":
        metrics["loss"] = answer.metric_records[f"{name}.loss"]["loss"]
    metrics[weighted_by or "num-examples"] = answer.metric_records[f"{name}.{EXAMPLES}"][EXAMPLES]

    modern = RecordDict({"metrics": MetricRecord(metrics)})
    if kind == "train":
        returned = numpy_arrays(answer.array_records[f"{name}.parameters"])
        if len(returned) == len(given):
            returned = dict(zip(given, returned.values(), strict=True))
        modern[key] = record_of(returned)
    return modern
