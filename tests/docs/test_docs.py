"""What the documents say holds: their snippets run, their commands parse, and what they name is there."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import click
import networkx as nx
import pytest
import yaml
from pages import DOCS, PAGES, ROOT, Command, anchors, commands, fences, links, named
from pydantic import BaseModel
from typer.main import get_command

from flower_privdec.cli.main import app, main
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.registry import part_field_in
from flower_privdec.experiment import Experiment
from flower_privdec.reporting.console import parts
from flower_privdec.scenario import Scenario, load_scenario, parse_scenario
from flower_privdec.scenario.loading import shipped
from flower_privdec.studies.spec import Axis, Study, load_study
from tools.docs import house, made
from tools.rooms import FLOOR_OF, MODULES, PACKAGE, imported, room_of

NAMED = re.compile(r"`((?:tests/\w+/)?test_\w+\.py)::(test_\w+)`")
EMBEDDED = ("digits", "breast-cancer", "diabetes", "synthetic-labels", "synthetic-words")
every_page = pytest.mark.parametrize("page", PAGES, ids=named)


@every_page
def test_every_test_that_a_page_names_is_there(page: Path) -> None:
    for file, name in NAMED.findall(page.read_text(encoding="utf-8")):
        (path,) = (ROOT / "tests").rglob(file.removeprefix("tests/"))
        assert f"def {name}(" in path.read_text(encoding="utf-8"), f"{file}::{name}"


@every_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.is_file() or (there.is_dir() and not anchor), f"{target} is not there"
        assert not anchor or anchor in anchors(there), f"{target}: no such heading"


def test_every_page_is_in_the_sites_contents() -> None:
    contents = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.SafeLoader)["nav"]
    assert {named(path).removeprefix("docs/") for path in DOCS} <= set(_leaves(contents))


def _leaves(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _leaves(part)


# --- snippets and commands ---


@every_page
def test_snippets_and_commands_do_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Go through a page as a reader would, in a folder of one's own: save files, run Python, run `privdec` on them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, Any] = {"__name__": "page"}
    before = set(sys.modules)
    for fence in fences(page):
        if fence.title is not None:
            Path(fence.title).write_text(fence.text, encoding="utf-8")
        elif fence.kind == "python":
            exec(compile("\n" * (fence.line - 1) + fence.text, str(page), "exec"), names)
        if fence.kind == "yaml":
            _check_yaml(fence.text, fence.title)
        for command in commands(fence) if fence.kind == "console" else ():
            capsys.readouterr()
            _check_command(command)
            if command.output:
                assert capsys.readouterr().err.splitlines() == command.output
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[name]


def _check_yaml(text: str, title: str | None) -> None:
    if "parts" in yaml.safe_load(text):
        assert title is not None
        load_study(title)
    else:
        parse_scenario(text)


def _check_command(command: Command) -> None:
    program, *words = command.words
    if program == "privdec":
        _check_privdec(words, command.output)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words) <= set(targets), f"make has the targets {targets}"
    elif program == "pytest":
        assert all((ROOT / word).is_file() for word in words if word.endswith(".py"))
    elif program == "flwr":
        if importlib.util.find_spec("flwr") is not None:
            from flwr.cli.app import app as flower

            _parse(get_command(flower), words)
    elif program == "python":
        if words[0] == "-m":
            assert importlib.util.find_spec(words[1]) is not None, f"no module {words[1]}"
        else:
            assert (ROOT / words[0]).exists()
    elif program == "cd":
        assert all((ROOT / word).is_dir() for word in words)
    else:
        assert program == "export", f"{program}: no test knows this command"


@cache
def privdec() -> click.Command:
    """Return the command line, which takes a tenth of a second to build."""
    return get_command(app)


def _check_privdec(words: list[str], output: list[str]) -> None:
    """Run a command that names what a reader has made by now; check any other against the repository."""
    given = _parse(privdec(), words)
    files = [Path(name) for name in (given.get("scenario"), *(given.get("runs") or ())) if name is not None]
    if words[0] == "study" and given["name"] is not None and given["name"] not in shipped("studies"):
        files = [Path(given["name"])]
    made_by_now = bool(files) and all(path.exists() for path in files)
    if made_by_now or output:
        with chdir(Path.cwd() if made_by_now else ROOT):
            _run(words, 2 if output else 0)
    else:
        for path in files:
            if (ROOT / path).is_dir():  # a Flower app, of `privdec audit`
                from flower_privdec.flower.launch.local_grid import read_config

                read_config(ROOT / path, given.get("run_config") or ())
            else:
                _check_scenario(ROOT / path, given.get("settings") or ())


def _parse(command: click.Command, words: list[str]) -> dict[str, Any]:
    """Parse a command line as it would be, and call nothing; return the innermost command's parameters."""
    context = command.make_context("command", list(words))
    rest = [*context._protected_args, *context.args] if isinstance(command, click.Group) else []
    if not rest:
        return context.params
    assert isinstance(command, click.Group)
    inner = command.commands.get(rest[0])
    assert inner is not None, f"there is no command {rest[0]}"
    return _parse(inner, rest[1:])


def _run(words: list[str], status: int) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == status, f"privdec {' '.join(words)} exits with {left.value.code}"


def _check_scenario(path: Path, settings: tuple[str, ...]) -> None:
    scenario = load_scenario(path, settings)
    if scenario.data.dataset in EMBEDDED:
        Experiment.build(scenario)


def test_a_stale_command_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line, error in {
        "privdec run a.yaml --no-such-option": click.UsageError,
        "privdec walk a.yaml": AssertionError,
        "privdec run scenarios/gone.yaml": ScenarioError,
        "privdec run scenarios/digits.yaml --set privacy.epsilom=1": ScenarioError,
        "privdec audit simulations/adapted-quickstart-sklearn": ScenarioError,
        "make gold": AssertionError,
        "pytest tests/test_gone.py": AssertionError,
        "rm -rf /": AssertionError,
    }.items():
        with pytest.raises(error):
            _check_command(Command(line.split(), []))


# --- what is made from the code ---


def test_pages_ask_for_every_part_and_no_other() -> None:
    asked = [name for page in DOCS for name in made.MARK.findall(page.read_text(encoding="utf-8"))]
    assert sorted(asked) == sorted(made.PARTS)


def _keys(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Yield every key of a section, and of the sections in it, from the fields themselves."""
    for name, info in model.model_fields.items():
        name = info.alias or name
        yield f"{path}{name}"
        part = part_field_in(info.annotation, info.metadata)
        for section in _sections(info.annotation) if part is None else part.forms():
            yield from _keys(section, f"{path}{name}.")


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation):
        yield from _sections(part)


def test_the_reference_gives_every_key_type_default_and_meaning() -> None:
    rows = [line.split(" | ") for line in made.PARTS["scenario"]().splitlines() if line.startswith("| `")]
    wanted = set(_keys(Scenario))
    assert {row[0].strip("| `") for row in rows} == wanted
    assert len(wanted) > 70
    for key, kind, default, _, meaning in rows:
        assert kind, key
        assert default, key
        assert meaning.strip(" |"), f"{key} has no line under Attributes in its section's docstring"


def test_the_reference_of_studies_says_what_every_key_means() -> None:
    text = made.PARTS["study"]()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `") and line.count(" | ") == 4]
    described = {re.sub(r"\.NAME", "", row[0].strip("| `")) for row in rows}
    assert set(_keys(Study)) - {f"parts.sizes.axes.{key}" for key in _keys(Axis)} <= described
    for key, kind, default, _, meaning in rows:
        assert kind, key
        assert default, key
        assert meaning.strip(" |"), f"{key} has no line under Attributes in its section's docstring"


def test_the_reference_says_the_rules_that_the_schema_has() -> None:
    rows = {line.split(" | ")[0].strip("| `"): line for line in made.PARTS["scenario"]().splitlines()}
    assert "| **required** | ≥ 1, ≤ 1e+06 |" in rows["n_peers"]
    assert "number or list of numbers | 1.0 | > 0 |".replace("1.0", "`1.0`") in rows["privacy.clip_norm"]
    assert "| `1` | ≥ 0, < 2^63 |" in rows["seed"]
    assert "`iid`, `dirichlet`" in rows["data.partition.kind"]


def test_every_command_and_algorithm_is_in_its_table() -> None:
    text, table = made.PARTS["commands"](), made.PARTS["algorithms"]()
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        assert f"## privdec {name}\n" in text
        for parameter in command.params:
            shown = parameter.opts[0] if isinstance(parameter, click.Option) else parameter.metavar
            assert f"| `{shown}" in text, f"{name} {shown}"
    assert all(f"| `{name}` | {said} |" in table for name, said in parts()["algorithms"].items())


@pytest.mark.slow
def test_the_picture_follows_the_imports_and_the_floors() -> None:
    drawing = ET.fromstring(house.picture())
    boxes = {box.get("data-room"): int(box.get("data-floor", "")) for box in drawing.iter() if box.get("data-room")}
    arrows = [(line.get("data-from"), line.get("data-to")) for line in drawing.iter() if line.get("data-from")]
    rooms = {room_of(path) for path in MODULES}
    assert set(boxes) == rooms <= set(FLOOR_OF)
    assert all(boxes[above] < boxes[below] for above, below in arrows)  # 0 is the top
    assert all(FLOOR_OF[above] > FLOOR_OF[below] for above, below in arrows)
    true = {(room_of(path), room) for path in MODULES for room in _rooms_imported(path) if room != room_of(path)}
    assert _reach(arrows) == _reach(sorted(true))
    assert set(arrows) <= true
    assert re.findall(r"^\| `(\w+)` \| \S", made.PARTS["rooms"](), re.MULTILINE) == [r for r in FLOOR_OF if r in rooms]


def _rooms_imported(path: Path) -> set[str]:
    parts = [name.split(".") for name in imported(path)]
    return {part[1] for part in parts if part[0] == PACKAGE.name and len(part) > 1 and part[1] in FLOOR_OF}


def _reach(pairs: list[tuple[str, str]]) -> set[tuple[str, str]]:
    return set(nx.transitive_closure(nx.DiGraph(pairs)).edges)


# --- docstrings ---

WITH_EXAMPLES = [path for path in sorted(PACKAGE.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=named)
def test_examples_in_docstrings_run(path: Path) -> None:
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted > 0


# --- the site ---


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert built.stdout + built.stderr == ""
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(DOCS)
    fetching = re.compile(r"""<(?:link|script|img)[^>]*(?:href|src)=["']?(?:https?:)?//""")
    for page in pages:
        assert not fetching.search(page.read_text(encoding="utf-8")), page
    assert '"javascripts/search-from-disk.js"' in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert (tmp_path / "site" / "javascripts" / "search-from-disk.js").is_file()
