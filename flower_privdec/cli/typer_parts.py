"""Arguments that several commands share, and what typer lacks: complete help, and a message at Ctrl-C."""

from __future__ import annotations

import gc
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from flower_privdec.common.errors import PrivdecError, ScenarioError, StoppedError
from flower_privdec.common.exit_codes import FAILED, INTERRUPTED, WRONG_INPUT
from flower_privdec.common.files import disk_error

ScenarioFile = Annotated[
    Path, typer.Argument(metavar="SCENARIO", help="A scenario file (YAML), or the name of a bundled one.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the scenario: privacy.epsilon=1. Repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def finite(value: float | None) -> float | None:
    """Return an option's number; refuse infinity and NaN."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value:g} must be a finite number")
    return value


class Command(TyperCommand):
    """A command whose help is complete with every version of typer and click."""

    def get_help(self, ctx: Any) -> str:
        """Return the help."""
        # Some versions of typer leave out the help of an argument, which still stands in its annotation.
        if self.callback:
            hints = get_type_hints(self.callback, include_extras=True)
        else:
            hints = {}
        for parameter in self.params:
            notes = getattr(hints.get(parameter.name), "__metadata__", ())
            texts = [note.help for note in notes if getattr(note, "help", None)]
            if texts and not getattr(parameter, "help", None):
                parameter.help = texts[0]
        return _plain(super().get_help(ctx))

    def format_arguments(self, ctx: Any, formatter: Any) -> None:
        """Print nothing: typer prints the arguments, which newer versions of click would repeat."""


class CommandGroup(TyperGroup):
    """The commands; Ctrl-C ends each with a message."""

    def get_help(self, ctx: Any) -> str:
        """Return the help."""
        return _plain(super().get_help(ctx))

    def invoke(self, ctx: Any) -> Any:
        """Run a command.

        Raises:
            StoppedError: Ctrl-C was pressed, at which typer would exit without a message.
        """
        with saying_when_interrupted("run the same command again"):
            return super().invoke(ctx)


@contextmanager
def starting() -> Iterator[None]:
    """Import and build without Python's garbage collector, which would scan all modules again and again.

    Objects that exist at the end last as long as the command, and are not scanned before it ends.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def saying_when_interrupted(*remedies: str, chosen: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Turn Ctrl-C into an error that says how to go on.

    Args:
        remedies: what the user may do next.
        chosen: returns which of them to say, at the time of the Ctrl-C.

    Raises:
        StoppedError: with that remedy.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        raise StoppedError(remedies[chosen()]) from error


# What the full install has and the small one has not: `flower-privdec-peer`.
NOT_LEAN = ("torch", "scipy", "numba", "sklearn", "networkx", "jinja2")


# What does here what commands of these names do in other programs.
OTHER_COMMANDS = {
    "`privdec run SCENARIO` trains": "train fit start launch simulate",
    "`privdec run SCENARIO --resume` goes on with a run": "resume continue",
    "`privdec report RUN RUN --out curves.pdf` draws finished runs": "compare plot draw curves",
    "`privdec study FILE` runs a grid of scenarios": "sweep grid experiment",
    "`privdec plan SCENARIO` checks a scenario and estimates its cost": "validate check lint estimate",
    "`privdec init FILE` writes a scenario": "new create wizard",
    "`privdec list` has what a scenario can name": "algorithms models datasets ls",
    "`privdec ledger PATH` prints what is spent": "budget spent epsilon",
    "`privdec export RUN --out model.onnx` writes a model and its card": "card model-card save",
    "`privdec audit` attacks the ε that a run claims": "attack attacks",
    "`privdec up SCENARIO` runs all peers as processes on this machine": "network serve",
    "`privdec peer` runs one peer on this device": "node client join worker",
    "`privdec deploy SCENARIO` makes a kit for each device": "kit kits install",
    "`privdec watch` shows peers on a live page": "dashboard monitor live",
    "`privdec --version` prints it": "version",
    "`privdec COMMAND --help` explains a command": "help",
}


def _unknown_command(message: str) -> str:
    """Return click's message about an unknown command; of one that other programs have, with what does it here."""
    word = message.removeprefix("No such command ").strip(".'").partition("'")[0]
    for here, others in OTHER_COMMANDS.items():
        if word.lower() in others.split():
            return f"No such command '{word}'; {here}"
    return message


def _unknown_option(message: str, name: str) -> str:
    """Return click's message about an unknown option; of a key of a scenario, with how it is set."""
    from flower_privdec.scenario.findings import whole_key
    from flower_privdec.scenario.sections import Scenario

    key = whole_key(name.lstrip("-"), Scenario)
    if key is None:
        return message
    return f"No such option '{name}'; it is a key of the scenario: write --set {key}=VALUE"


class Failure(NamedTuple):
    """What a command says of an error that ends it, and its exit status."""

    kind: str
    message: str
    status: int


def failure_of(error: BaseException) -> Failure | None:
    """Return what to say of an error; None if it is a bug, whose traceback says more."""
    if isinstance(error, StoppedError):
        return Failure("interrupted", str(error), INTERRUPTED)
    if isinstance(error, PrivdecError):
        return Failure("error", str(error), error.exit_status)
    if isinstance(error, OSError):
        problem = disk_error(error)
        return Failure("error", str(problem), problem.exit_status)

    usage = getattr(error, "format_message", None)  # click's usage errors have it, and typer's own copy of them
    if usage is not None:
        context = getattr(error, "ctx", None)
        path = "privdec" if context is None else context.command_path
        message = " ".join(usage().split()).rstrip(".")
        parameters = () if context is None else context.command.params
        has_settings = any("--set" in parameter.opts for parameter in parameters)
        if has_settings and message.startswith("Got unexpected extra argument"):
            message += "; a setting is written as --set KEY=VALUE"
        elif has_settings and message.startswith("No such option"):
            message = _unknown_option(message, getattr(error, "option_name", ""))
        elif message.startswith("No such command"):
            message = _unknown_command(message)
        return Failure("error", f"{message}; see `{path} --help`", getattr(error, "exit_code", WRONG_INPUT))

    if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] in NOT_LEAN:
        advice = "the small install runs peers of linear and small models; for all else, pip install flower-privdec"
        return Failure("error", f"this needs {error.name}, which is not installed: {advice}", WRONG_INPUT)

    # torch raises a RuntimeError, in words that depend on the device.
    if isinstance(error, MemoryError) or "allocate" in str(error) or "out of memory" in str(error):
        advice = "use a smaller model or fewer peers (`privdec plan` estimates the need)"
        return Failure("error", f"memory ran out; {advice}", FAILED)
    return None


def checkout_tool(module: str, command: str) -> ModuleType:
    """Import a module of tools/, which lies beside the package in a source checkout and is not in the wheel.

    The processes that it starts find tools/ by PYTHONPATH.

    Raises:
        ScenarioError: the package is not in a checkout.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / "tools" / "walk.py").is_file():
        raise ScenarioError(
            f"`privdec {command}` needs a source checkout, for tools/ is not in the wheel: unpack the source "
            "distribution or clone the repository, then run `pip install -e .` in it",
            code="cli.no-checkout",
        )
    if str(root) not in sys.path[:1]:
        sys.path.insert(0, str(root))
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(root) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, paths)])
    return import_module(module)


def _plain(text: str) -> str:
    return text.replace("\\[", "[")
