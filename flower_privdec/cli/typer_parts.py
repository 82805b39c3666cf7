"""What commands share: arguments that several have, and what typer lacks (whole help, words for Ctrl-C)."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from flower_privdec.errors import ScenarioError, StoppedError

ScenarioFile = Annotated[
    Path, typer.Argument(metavar="SCENARIO", help="A scenario file (YAML), or the name of one that comes along.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Lay a value over the scenario, as privacy.epsilon=1."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


class Command(TyperCommand):
    """A command whose help is whole, whichever versions of typer and click print it."""

    def get_help(self, ctx: Any) -> str:
        """Return the help."""
        helps = _argument_helps(self.callback)
        for parameter in self.params:
            if not getattr(parameter, "help", None) and parameter.name in helps:
                parameter.help = helps[parameter.name]
        return _plain(super().get_help(ctx))

    def format_arguments(self, ctx: Any, formatter: Any) -> None:
        """Leave to typer what newer versions of click list a second time."""


class CommandGroup(TyperGroup):
    """The commands, of which each may be stopped by Ctrl-C."""

    def get_help(self, ctx: Any) -> str:
        """Return the help."""
        return _plain(super().get_help(ctx))

    def invoke(self, ctx: Any) -> Any:
        """Run a command.

        Raises:
            StoppedError: Ctrl-C was pressed, which typer would end without a word.
        """
        try:
            with saying_when_interrupted("run the same command again"):
                return super().invoke(ctx)
        finally:
            gc.unfreeze()  # see `starting`


@contextmanager
def starting() -> Iterator[None]:
    """Import and build without Python's garbage collector, which would look through all modules again and again.

    What is there at the end lasts as long as the command, and is not looked at before it ends.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def saying_when_interrupted(*remedies: str, chosen: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Turn Ctrl-C into a line that says how to go on.

    Args:
        remedies: what may be done then.
        chosen: says which of them, when it happens.

    Raises:
        StoppedError: with that line.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        raise StoppedError(remedies[chosen()]) from error


def checkout_tool(module: str, command: str) -> ModuleType:
    """Import a module of tools/, which lies beside the package in a source checkout and is not in the wheel.

    The processes that it starts find tools/ by PYTHONPATH.

    Raises:
        ScenarioError: the package does not lie in a checkout.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / "tools" / "walk.py").is_file():
        raise ScenarioError(
            f"`privdec {command}` needs a source checkout, for tools/ is not in the wheel: unpack the source "
            "distribution or clone the repository, then run `pip install -e .` in it"
        )
    if str(root) not in sys.path[:1]:
        sys.path.insert(0, str(root))
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(root) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, paths)])
    return import_module(module)


def _plain(text: str) -> str:
    return text.replace("\\[", "[")


def _argument_helps(function: Callable[..., Any] | None) -> dict[str, str]:
    """Return what the function's annotations say of its parameters."""
    hints = get_type_hints(function, include_extras=True) if function else {}
    notes = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    helps = {name: getattr(note, "help", None) for name, annotation in notes.items() for note in annotation}
    return {name: text for name, text in helps.items() if text}
