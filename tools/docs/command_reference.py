"""Every command of `privdec` with its arguments and options, read from the command line itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import click
from typer.main import get_command
from typer.utils import get_params_from_function

from flower_privdec.cli.main import app


def option(parameter: click.Parameter, text: str) -> str:
    """Return a row for an argument or an option."""
    choices = list(getattr(parameter.type, "choices", ()))
    flag = getattr(parameter, "is_flag", False) or isinstance(parameter, click.Argument)
    kind = "" if flag or choices else (parameter.metavar or parameter.type.name.upper().removesuffix(" RANGE"))
    name = parameter.metavar if isinstance(parameter, click.Argument) else f"{parameter.opts[0]} {kind}".strip()
    shown = getattr(parameter, "show_default", None)
    default = shown if isinstance(shown, str) else None if flag else parameter.default
    more = [f"One of {', '.join(f'`{choice}`' for choice in choices)}."] if choices else []
    more += [] if default is None else [f"Default `{getattr(default, 'value', default)}`."]
    return f"| `{name}` | {' '.join([text, *more])} |"


def options(command: click.Command, callback: Callable[..., Any]) -> Iterator[str]:
    """Yield a row for each argument and option of a command."""
    declared = get_params_from_function(callback)
    for parameter in command.params:
        yield option(parameter, declared[str(parameter.name)].default.help or "")


def command_reference() -> str:
    """Return the reference as Markdown."""
    commands: dict[str, click.Command] = get_command(app).commands  # type: ignore[attr-defined]
    parts = []
    for info, (name, command) in zip(app.registered_commands, commands.items(), strict=True):
        assert info.callback is not None
        usage = " ".join(command.collect_usage_pieces(click.Context(command)))
        rows = "\n".join(options(command, info.callback))
        head = f"## privdec {name}\n\n{command.help}\n\n    privdec {name} {usage}\n"
        parts.append(f"{head}\n| argument | meaning |\n|---|---|\n{rows}\n")
    return "\n".join(parts)
