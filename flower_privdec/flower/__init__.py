"""All that a Flower app imports to become private and serverless.

`PushSum`, `Gossip` and `Mesh` take a strategy's place in the ServerApp; `PeerMod` makes the ClientApp a peer and
protects it as a whole; `private` protects each example of a torch training loop.
"""

from flower_privdec.flower.launch.local_grid import LocalGrid, run_in_process
from flower_privdec.flower.mods.peer_mod import PeerMod
from flower_privdec.flower.mods.peer_state import peer_folder, public_key
from flower_privdec.flower.strategies.feddeper_strategy import FedDeperStrategy as FedDeper
from flower_privdec.flower.strategies.feddeper_strategy import personalized, train_two_models
from flower_privdec.flower.strategies.mesh_strategy import Mesh
from flower_privdec.flower.strategies.push_sum import Gossip, PushSum
from flower_privdec.training_loop import ExamplePrivacy, group_norm, private

__all__ = [
    "ExamplePrivacy",
    "FedDeper",
    "Gossip",
    "LocalGrid",
    "Mesh",
    "PeerMod",
    "PushSum",
    "group_norm",
    "peer_folder",
    "personalized",
    "private",
    "public_key",
    "run_in_process",
    "train_two_models",
]
