#!/usr/bin/env bash
# flwr 1.42.0: the batch counter of BatchNorm uses up the clipping norm of a whole model update.
#
# Expected: clipping to norm C bounds what is trained. A model's update of norm below C stays as it is.
# Seen: a PyTorch state_dict holds `num_batches_tracked` for each BatchNorm layer. `fixedclipping_mod` (and all the other
# differential privacy mods and wrappers, which share its functions) takes its difference as a part of the update: after
# 100 batches it is 100, so an update of norm 0.5 is scaled to 0.005 at C = 1. Training hardly moves, without a warning.
# Here: only floating arrays are clipped, noised and mixed; counters stay with their peer.
#
# Runs flwr on its own. The arrays are those of a BatchNorm model after an epoch of 100 batches. Exits with 1 if the
# behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check flwr==1.42.0 numpy==2.3.5

cat > "$folder/show.py" <<'PYTHON'
import logging

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.mod import fixedclipping_mod
from flwr.supercore.task_identity import TaskIdentity

logging.getLogger("flwr").setLevel(logging.ERROR)
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as a SuperLink sets them


def record(weight, batches):
    arrays = {"bn.weight": np.array([weight]), "bn.num_batches_tracked": np.array(batches)}
    return ArrayRecord({name: Array(value) for name, value in arrays.items()})


def moved(batches):
    """Return how far the weight moves if training moves it by 0.5, clipped to norm 1."""
    content = {"arrays": record(0.0, 0), "config": ConfigRecord({"clipping_norm": 1.0})}
    asked = Message(RecordDict(content), 1, "train")
    asked.metadata.__dict__["_message_id"] = "1"

    def app(message, context):
        return Message(RecordDict({"arrays": record(0.5, batches)}), reply_to=message)

    context = Context(1, 1, {}, RecordDict(), {})
    answer = fixedclipping_mod(asked, context, app)
    return float(answer.content["arrays"]["bn.weight"].numpy()[0])


without, counted = moved(0), moved(100)
print(f"the weight moves by 0.5; after clipping to 1: {without:.4f} without batches, {counted:.4f} after 100 batches")
raise SystemExit(not (without == 0.5 and counted < 0.01))
PYTHON
"$folder/env/bin/python" "$folder/show.py"
