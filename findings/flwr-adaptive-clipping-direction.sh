#!/usr/bin/env bash
# flwr 1.42.0: adaptive clipping moves the clipping norm away from its target quantile.
#
# Expected (Andrew et al. 2021, arXiv:1905.03871, the source that Flower names): the norm settles where the target share
# of the updates is clipped. If more are clipped than that, it grows; if fewer, it shrinks.
# Seen: `DifferentialPrivacyServerSideAdaptiveClipping` counts the updates that *are* clipped, and uses the paper's rule
# for those that are *not*. So if all are clipped the norm shrinks, and if none is it grows, for as long as the run goes.
# The client-side wrapper and its mod count in the same way.
# Here: the clip norm is the user's, fixed and public; nothing adapts it.
#
# Who follows the documented defaults (initial norm 0.1) trains with a norm that falls towards 0.
# Runs flwr on its own, without noise, so that nothing is random. Exits with 1 if the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check flwr==1.42.0 numpy==2.3.5

cat > "$folder/show.py" <<'PYTHON'
import logging

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideAdaptiveClipping, FedAvg
from flwr.supercore.task_identity import TaskIdentity

logging.getLogger("flwr").setLevel(logging.ERROR)
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as a SuperLink sets them for a ServerApp


def reply(node, update):
    asked = Message(RecordDict(), node, "train")
    asked.metadata.__dict__["_message_id"] = str(node)
    content = {"arrays": ArrayRecord([update]), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=asked)


def norm_after(rounds, initial):
    """Return the clipping norm after rounds of four updates of norms 1, 2, 3 and 4, from a model of zeros."""
    wrapper = DifferentialPrivacyServerSideAdaptiveClipping(
        FedAvg(), noise_multiplier=0.0, num_sampled_clients=4, initial_clipping_norm=initial,
        target_clipped_quantile=0.5, clipped_count_stddev=0.0,
    )
    wrapper.current_arrays = ArrayRecord([np.zeros(1)])
    for number in range(rounds):
        wrapper.aggregate_train(number + 1, [reply(norm, np.array([float(norm)])) for norm in (1, 2, 3, 4)])
    return wrapper.clipping_norm


small, large = norm_after(20, 0.1), norm_after(20, 10.0)
print(f"median of the updates' norms 2.5; 20 rounds from 0.1: {small:.3g}, from 10: {large:.3g}")
raise SystemExit(not (small < 0.1 and large > 10.0))
PYTHON
"$folder/env/bin/python" "$folder/show.py"
