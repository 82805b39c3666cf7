"""The ClientApp that answers the message at hand, and its evaluate function.

Flower hands a mod only the function that it stands before. `PeerMod` has more to do in a train message: it lets the app
evaluate the model of the round before, so that an evaluation needs no message of its own, and no process when deployed.
So it looks for the ClientApp among the calls that led to it.

What is Flower's own (1.41 to 1.43): the two attributes `_call` and `_registered_funcs`. If they are missing, or another
thread made the call, no function is found, and each evaluation has its own message.
"""

from __future__ import annotations

import sys
from types import FrameType

from flwr.clientapp import ClientApp

from flower_privdec.flower.mods.legacy_client import App

EVALUATE_FUNCTION = "evaluate.default"  # that strategies call


def evaluate_function(app: App) -> App | None:
    """Return what the running ClientApp answers an evaluate message by; None if that is not known.

    Args:
        app: what the mod that asks stands before.
    """
    running = _running_app()
    if running is None:
        return None
    if getattr(running, "_call", None) is not None:
        return app  # of a client_fn, which answers messages of all types

    functions: dict[str, App] = getattr(running, "_registered_funcs", {})
    return functions.get(EVALUATE_FUNCTION)


def _running_app() -> ClientApp | None:
    """Return the innermost ClientApp that is answering a message in this thread; None if there is none."""
    code = ClientApp.__call__.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            running: ClientApp = frame.f_locals["self"]
            return running
        frame = frame.f_back
    return None
