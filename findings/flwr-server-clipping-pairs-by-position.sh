#!/usr/bin/env bash
# flwr 1.42.0: server-side clipping pairs a reply's arrays with the model's by position, not by name.
#
# Expected: the update of an array is its new value less its old one. FedAvg itself averages by name, so a reply whose
# ArrayRecord lists the same arrays in another order gives the same model.
# Seen: `DifferentialPrivacyServerSideFixedClipping` subtracts the first array of the model from the first of the reply.
# Arrays of one shape in another order make an update out of the difference of two layers, which is clipped, and the
# client's model is replaced by a mixture of both. There is no error. The client-side mods refuse such a reply.
# Here: arrays are paired by name, in any order.
#
# A client that returns sorted names, or a model whose layers are declared in another order, is enough.
# Runs flwr on its own, without noise. Exits with 1 if the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check flwr==1.42.0 numpy==2.3.5

cat > "$folder/show.py" <<'PYTHON'
import logging

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.supercore.task_identity import TaskIdentity

logging.getLogger("flwr").setLevel(logging.ERROR)
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as a SuperLink sets them for a ServerApp
MODEL = {"first": 10.0, "second": 20.0}


def record(names):
    return ArrayRecord({name: Array(np.array([MODEL[name]])) for name in names})


def reply(names):
    """Return the reply of a node that has not moved the model at all."""
    asked = Message(RecordDict(), 1, "train")
    asked.metadata.__dict__["_message_id"] = "1"
    content = {"arrays": record(names), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=asked)


def model_after(names, clipped):
    strategy = FedAvg()
    if clipped:
        strategy = DifferentialPrivacyServerSideFixedClipping(
            strategy, noise_multiplier=0.0, clipping_norm=1.0, num_sampled_clients=1
        )
        strategy.current_arrays = record(["first", "second"])
    arrays, _ = strategy.aggregate_train(1, [reply(names)])
    return {name: round(float(value.numpy()[0]), 3) for name, value in arrays.items()}


other = ["second", "first"]
plain = model_after(other, clipped=False)
clipped = model_after(other, clipped=True)
print(f"a node that moves nothing, names in another order: FedAvg {plain}, with server-side clipping {clipped}")
raise SystemExit(not (plain == MODEL and clipped != MODEL))
PYTHON
"$folder/env/bin/python" "$folder/show.py"
