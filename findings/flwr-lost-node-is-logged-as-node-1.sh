#!/usr/bin/env bash
# flwr 1.42.0: the log line for a SuperNode that is lost in a round names node 1, which no SuperNode is.
#
# Expected: if a SuperNode does not answer in a round, the ServerApp's log says which one, as it does if its app raises.
# Seen: the SuperLink answers in its place, with an error whose `metadata.src_node_id` is the SuperLink's own id, 1. So
# FedAvg logs "Received error in reply from node 1: Node Unavailable" for each lost SuperNode, whichever it is. Only
# `metadata.reply_to_message_id` leads to the node, for a strategy that has kept the ids of its messages.
# Here: replies are matched to nodes by the message that they answer, and the log names the peer that is gone.
#
# Runs flwr on its own: the function by which a SuperLink answers for nodes without a heartbeat, and FedAvg's aggregation
# of what it returns. Exits with 1 if the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check flwr==1.42.0 numpy==2.3.5

cat > "$folder/show.py" <<'PYTHON'
import logging

from flwr.app import Message, RecordDict
from flwr.server.superlink.linkstate.utils import check_node_availability_for_in_message
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as a SuperLink sets them for a ServerApp
LOST = [6189821893141391311, 2738488925151848920]

lines = []


class Kept(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage().strip())


logging.getLogger("flwr").addHandler(Kept())

asked = {}
for node in LOST:
    message = Message(RecordDict(), node, "train")
    message.metadata.__dict__["_message_id"] = message.object_id
    asked[message.object_id] = message

last_heartbeat = {node: 1.0 for node in LOST}
replies = check_node_availability_for_in_message(set(asked), asked, last_heartbeat)
FedAvg().aggregate_train(1, replies.values())

named = [line for line in lines if "Received error in reply from node" in line]
print("lost:", *LOST)
print(*named, sep="\n")
found = {asked[reply.metadata.reply_to_message_id].metadata.dst_node_id for reply in replies.values()}
assert found == set(LOST)
raise SystemExit(not (len(named) == 2 and all("from node 1: " in line for line in named)))
PYTHON
"$folder/env/bin/python" "$folder/show.py"
