"""All that a Flower app imports to become private and serverless.

`PushSum` and `Gossip` take a strategy's place in the ServerApp, `PeerMod` makes the ClientApp a peer.
"""

from flower_privdec.runtime.flower.feddeper_strategy import FedDeperStrategy, personalized, train_two_models
from flower_privdec.runtime.flower.in_process import run_in_process
from flower_privdec.runtime.flower.local_grid import LocalGrid
from flower_privdec.runtime.routed.peer_mod import PeerMod
from flower_privdec.runtime.routed.sealing import public_key
from flower_privdec.runtime.routed.strategies import Gossip, PushSum

__all__ = [
    "FedDeperStrategy",
    "Gossip",
    "LocalGrid",
    "PeerMod",
    "PushSum",
    "personalized",
    "public_key",
    "run_in_process",
    "train_two_models",
]
