"""Everything that a Flower app imports to become private and serverless.

`PushSum`, `Gossip` and `Mesh` take a strategy's place in the ServerApp; `PeerMod` makes the ClientApp a peer and
protects it as a whole; `private` protects each example of a torch training loop, and `fit_privately` of a linear model
of scikit-learn. Each name is imported when it is first used: a ClientApp with `PeerMod` needs no torch.

The parts of the room:

| | |
|---|---|
| `strategies`, `mods` | a user's app as peers: the ServerApp's side, and the ClientApp's |
| `serverless` | a user's app as peers that connect directly, with no server |
| `apps` | a scenario as a Flower app: its ServerApp and its ClientApp |
| `launch` | how apps are run: by `flwr run`, in this process, or under an owner's policy |
| `node_settings` | what a node's owner decides, which no message can change |
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flower_privdec.flower.launch.local_grid import LocalGrid, run_in_process
    from flower_privdec.flower.mods.peer_mod import PeerMod, peer_folder
    from flower_privdec.flower.strategies.dual_averaging_strategy import DualAveragingStrategy as DualAveraging
    from flower_privdec.flower.strategies.feddeper_strategy import FedDeperStrategy as FedDeper
    from flower_privdec.flower.strategies.feddeper_strategy import personalized, train_two_models
    from flower_privdec.flower.strategies.mesh_strategy import Mesh
    from flower_privdec.flower.strategies.push_sum import Gossip, PushSum
    from flower_privdec.peer.identity import public_key
    from flower_privdec.training_loop import ExamplePrivacy, fit_privately, group_norm, private

if find_spec("flwr") is None:
    raise ModuleNotFoundError(
        "flower_privdec.flower needs flwr, which is not installed: pip install 'flower-privdec[flower]'", name="flwr"
    )

_MODULES = {
    "DualAveraging": "flower.strategies.dual_averaging_strategy",
    "ExamplePrivacy": "training_loop",
    "FedDeper": "flower.strategies.feddeper_strategy",
    "Gossip": "flower.strategies.push_sum",
    "LocalGrid": "flower.launch.local_grid",
    "Mesh": "flower.strategies.mesh_strategy",
    "PeerMod": "flower.mods.peer_mod",
    "PushSum": "flower.strategies.push_sum",
    "fit_privately": "training_loop",
    "group_norm": "training_loop",
    "peer_folder": "flower.mods.peer_mod",
    "personalized": "flower.strategies.feddeper_strategy",
    "private": "training_loop",
    "public_key": "peer.identity",
    "run_in_process": "flower.launch.local_grid",
    "train_two_models": "flower.strategies.feddeper_strategy",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"flower_privdec.{_MODULES[name]}")

    # Their classes are named apart from the algorithms of scenarios.
    if name in ("DualAveraging", "FedDeper"):
        return getattr(module, f"{name}Strategy")
    return getattr(module, name)


__all__ = [
    "DualAveraging",
    "ExamplePrivacy",
    "FedDeper",
    "Gossip",
    "LocalGrid",
    "Mesh",
    "PeerMod",
    "PushSum",
    "fit_privately",
    "group_norm",
    "peer_folder",
    "personalized",
    "private",
    "public_key",
    "run_in_process",
    "train_two_models",
]
