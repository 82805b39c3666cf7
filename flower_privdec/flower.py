"""All that a Flower app imports to become private and serverless.

`PushSum` and `Gossip` take a strategy's place in the ServerApp; `PeerMod` makes the ClientApp a peer and protects it as
a whole; `private` protects each example of a torch training loop.
"""

from flower_privdec.example_privacy import ExamplePrivacy, group_norm, private
from flower_privdec.runtime.flower.feddeper_strategy import FedDeperStrategy, personalized, train_two_models
from flower_privdec.runtime.flower.in_process import run_in_process
from flower_privdec.runtime.flower.local_grid import LocalGrid
from flower_privdec.runtime.routed.peer_mod import PeerMod, peer_folder
from flower_privdec.runtime.routed.sealing import public_key
from flower_privdec.runtime.routed.strategies import Gossip, PushSum

__all__ = [
    "ExamplePrivacy",
    "FedDeperStrategy",
    "Gossip",
    "LocalGrid",
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
