"""Every command of `privdec` with its arguments and options, read from the command line itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import click
from typer.main import get_command
from typer.utils import get_params_from_function

from flower_privdec.cli.main import app


def option(parameter: click.Parameter, text: str) -> str:
    """Return a table's row for an argument or an option: its name and kind, its meaning, its choices, its default."""
    choices = list(getattr(parameter.type, "choices", ()))
    takes_no_value = getattr(parameter, "is_flag", False)
    is_argument = isinstance(parameter, click.Argument)

    if is_argument:
        name = parameter.metavar
    elif takes_no_value or choices:
        name = parameter.opts[0]
    else:
        kind = parameter.metavar or parameter.type.name.upper().removesuffix(" RANGE")
        name = f"{parameter.opts[0]} {kind}"

    sentences = [text]
    if choices:
        sentences.append(f"One of {', '.join(f'`{choice}`' for choice in choices)}.")

    # Typer lets a command say its default in words, if the value itself would tell a reader nothing.
    default = getattr(parameter, "show_default", None)
    if not isinstance(default, str):
        default = None if takes_no_value or is_argument else parameter.default
    if default is not None:
        sentences.append(f"Default `{getattr(default, 'value', default)}`.")

    return f"| `{name}` | {' '.join(sentences)} |"


def options(command: click.Command, callback: Callable[..., Any]) -> Iterator[str]:
    """Yield a row for each argument and option of a command."""
    declared = get_params_from_function(callback)
    for parameter in command.params:
        yield option(parameter, declared[str(parameter.name)].default.help or "")


def command_reference() -> str:
    """Return the reference as Markdown."""
    commands: dict[str, click.Command] = get_command(app).commands  # type: ignore[attr-defined]
    parts = []

    # Help without the terminal's colours and line breaks comes from the functions, usage from the commands.
    for info, (name, command) in zip(app.registered_commands, commands.items(), strict=True):
        assert info.callback is not None
        usage = " ".join(command.collect_usage_pieces(click.Context(command)))
        head = f"## privdec {name}\n\n{command.help}\n\n    privdec {name} {usage}\n"
        rows = "\n".join(options(command, info.callback))
        parts.append(f"{head}\n| argument | meaning |\n|---|---|\n{rows}\n")
    return "\n".join(parts)
