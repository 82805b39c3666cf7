#!/usr/bin/env bash
# flwr 1.42.0: the log line for a SuperNode that is lost in a round names node 1, which no SuperNode is.
#
# Expected: when a SuperNode does not answer in a round, the ServerApp's log says which one, as it does if its app raises.
# Seen: the SuperLink answers for the lost SuperNode with an error whose `metadata.src_node_id` is the SuperLink's own id,
# 1. FedAvg logs "Received error in reply from node 1: Node Unavailable ..." for each lost SuperNode, whichever it is. A
# strategy finds the node only by `reply_to_message_id`, if it has kept the ids of the messages that it has sent.
#
# Runs flwr on its own: a SuperLink and three SuperNodes on 127.0.0.1, one of which is ended (SIGTERM) while its app
# trains. Takes about a minute. Exits with 1 if the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
started=()
trap 'kill "${started[@]}" 2>/dev/null || true; wait; rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check flwr==1.42.0 numpy==2.3.5
export PATH="$folder/env/bin:$PATH" FLWR_HOME="$folder/home" FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 SIGNS="$folder"

mkdir -p "$folder/home" "$folder/app/lost"
cat > "$folder/app/pyproject.toml" <<'TOML'
[project]
name = "lost"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "example"

[tool.flwr.app.components]
serverapp = "lost.apps:server"
clientapp = "lost.apps:client"
TOML
touch "$folder/app/lost/__init__.py"
cat > "$folder/app/lost/apps.py" <<'PYTHON'
import os
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

SIGNS = Path(os.environ["SIGNS"])
server = ServerApp()
client = ClientApp()


@server.main()
def main(grid, context):
    while len(list(grid.get_node_ids())) < 3:
        time.sleep(0.2)
    for node in grid.get_node_ids():
        print("a SuperNode:", node)
    FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord([np.zeros(1)]), num_rounds=1)
    print("the end of the run")


@client.train()
def train(message, context):
    (SIGNS / f"trains-{context.node_config['place']}").touch()
    if context.node_config["place"] == 0:
        time.sleep(600)
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)
PYTHON

ports=($(python - <<'PYTHON'
import socket

sockets = [socket.socket() for _ in range(4)]
for one in sockets:
    one.bind(("127.0.0.1", 0))
print(*(one.getsockname()[1] for one in sockets))
PYTHON
))
link="127.0.0.1:${ports[0]}"
printf '[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "%s"\ninsecure = true\n' "$link" > "$folder/home/config.toml"
cd "$folder"

flower-superlink --insecure --host 127.0.0.1 --port "${ports[0]}" > superlink.log 2>&1 &
started+=($!)
sleep 10
nodes=()
for place in 0 1 2; do
    flower-supernode --insecure --superlink "$link" --port "${ports[place + 1]}" --node-config "place=$place" > "node-$place.log" 2>&1 &
    started+=($!)
    nodes+=($!)
done
timeout 300 flwr run app here --stream > run.log 2>&1 &
run=$!
started+=("$run")

for _ in $(seq 600); do
    if [ -e trains-0 ]; then break; fi
    sleep 0.2
done
[ -e trains-0 ]
kill -TERM "${nodes[0]}"
for _ in $(seq 1500); do
    if grep -q "the end of the run" run.log; then break; fi
    sleep 0.2
done

grep -a "a SuperNode: \|Received error\|the end of the run" run.log
grep -qa "Received error in reply from node 1: " run.log && ! grep -qa "a SuperNode: 1$" run.log
