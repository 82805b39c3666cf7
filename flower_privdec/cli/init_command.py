"""`privdec init` and `privdec schema`: a first scenario from a few questions, and what editors check files by.

`init` writes two files: the scenario, which is checked as `run` would, and its JSON schema beside it. The first line of
the scenario names the schema, so that editors with YAML support complete keys, explain them and mark mistakes.

The constants of a table's columns are computed from the public test set, and from nothing else: those of private rows
would be a release that no ledger counts.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from unicodedata import category

import numpy as np
import typer
from pydantic import BaseModel

from flower_privdec.common.errors import ScenarioError, did_you_mean, option
from flower_privdec.common.files import naming
from flower_privdec.common.formatting import shown
from flower_privdec.data.intake import listed
from flower_privdec.data.number_texts import CLOCK, DATE, KNOWN_MARKS, WITH_UNIT, TextColumn, reader
from flower_privdec.data.table_columns import LARGEST
from flower_privdec.data.table_files import Texts, read_texts
from flower_privdec.experiment import Agreement
from flower_privdec.scenario.file_sections import composed
from flower_privdec.scenario.loading import parse_scenario, write_yaml
from flower_privdec.scenario.sections import PEER, AppScenario, Scenario
from flower_privdec.studies.spec import Study

FILES: dict[str, type[BaseModel]] = {"scenario": Scenario, "app": AppScenario, "study": Study}
SCHEMA_FILE = "privdec-scenario.schema.json"

DIGITS = "digits"
TABLE = "csv"
IMAGES = "image-folder"
DATA = (DIGITS, TABLE, IMAGES)
MOST_CLASSES = 20  # a target with more different numbers is a number to learn
MOST_CATEGORIES = 30  # a column of texts with more has names or free text, from which softmax learns nothing
MOST_LISTED = 12  # classes in a note
RARE = 0.4  # of the share that each class has if all are as frequent
LEAST_IDS = 20  # rows, in which whole numbers are hardly all different by chance
ID_WORDS = frozenset(("id", "nr", "no", "number", "key", "index", "idx", "uid", "pid", "mrn"))
CODES = frozenset((-1.0, -9.0, -99.0, -999.0, -9999.0, 99.0, 999.0, 9999.0, 99999.0))  # of missing values, somewhere
CONTROL = ("Cc", "Cs", "Zl", "Zp")  # Unicode's categories of characters that YAML, or a terminal, would obey
MARKS = ((".", None), *(marks for marks in KNOWN_MARKS if marks != (".", None)))  # the first that reads most columns
ALL = "all"
COMMENTS = {
    "data": "What peers train on; `test` is public, and tries every model.",
    "algorithm": "How peers learn and what they exchange. The learning rate decides most: try several.",
    "privacy": "Each peer's guarantee for each of its examples, against everybody else.",
    "compute": "Noise of the operating system: models may be handed out. Without it, runs can be repeated instead.",
}

T = TypeVar("T")


@dataclass(frozen=True)
class Answers:
    """What a first scenario is made of.

    Attributes:
        data: one of `DATA`.
        root: the path of each peer's own data, with {peer}; None for data that come along.
        test: the public test set's path.
        target: the column of a table that is learned.
        at_least: how many examples every peer has at least, which everybody may know.
        epsilon: each peer's budget; None for no privacy.
        colluding: how many peers may work together against one; None for all others.
    """

    data: str
    peers: int
    rounds: int
    epsilon: float | None
    colluding: int | None
    root: str | None = None
    test: Path | None = None
    target: str | None = None
    at_least: int | None = None


def schema_text(kind: str) -> str:
    """Return the JSON schema of a kind of file, of `FILES`."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    schema |= FILES[kind].model_json_schema(by_alias=True)
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


# --- questions ---


class Questions:
    """Asks on stderr for what no option says; with `defaults`, takes what most people would answer."""

    def __init__(self, defaults: bool) -> None:
        """Begin; `defaults`: ask nothing."""
        self._defaults = defaults

    def answer(self, name: str, given: object, text: str, read: Callable[[str], T], default: str | None = None) -> T:
        """Return the answer to a question.

        Args:
            name: of the option that answers it too.
            given: what the option says; None if it is left out.
            read: makes the answer of a text; raises typer.BadParameter with the rule, and is asked again.
            default: None if nobody can guess it.

        Raises:
            ScenarioError: there is neither an answer nor a default, and nothing may be asked.
            typer.BadParameter: the option breaks the rule.
        """
        if given is not None:
            return read(str(given))
        if not self._defaults:
            try:
                answer: T = typer.prompt(text, default=default, value_proc=read, err=True)
            except typer.Abort as error:
                # The end of the input, as in a script or a container, or Ctrl-C.
                raise ScenarioError(
                    f"{option(name)} was not answered, and nothing is written: give it, or --yes for what most answer",
                    code="init.needed",
                ) from error
            return answer
        if default is None:
            raise ScenarioError(f"{option(name)} is needed with --yes: {text[0].lower()}{text[1:]}", code="init.needed")
        return read(default)


def ask(defaults: bool, given: Mapping[str, object]) -> Answers:
    """Return the answers.

    Args:
        defaults: ask nothing.
        given: by the names of `Answers`, what options say; None for those that are left out.

    Raises:
        ScenarioError: an answer is needed and may not be asked for, or an option answers no question.
        typer.BadParameter: an option breaks its rule.
    """
    questions = Questions(defaults)
    unused = {name for name, value in given.items() if value is not None}

    def answer(name: str, text: str, read: Callable[[str], T], default: str | None = None) -> T:
        unused.discard(name)
        return questions.answer(name.replace("_", "-"), given[name], text, read, default)

    data = answer("data", f"Data ({', '.join(DATA)})", _one_of_data, DIGITS)
    own: dict[str, Any] = {}
    if data != DIGITS:
        own["root"] = answer("root", "Path of each peer's own data, with {peer} for its number", _with_peer)
        own["test"] = answer("test", "Path of the public test set, which no ε protects", _existing)
    if data == TABLE:
        own["target"] = answer("target", "Name of the column to learn", _column_of(own["test"]))

    # Who has the files of all peers here, as in a simulation, probably means all of them.
    n_files = _n_numbered(own.get("root"))
    usual = "8"
    if n_files >= 2:
        usual = str(n_files)
    peers = answer("peers", "Number of peers", _whole(2), usual)
    epsilon = answer("epsilon", "ε of each peer, or none", _epsilon, "3")
    colluding = None
    if epsilon is not None:
        text = "How many peers might work together against one? With a number, noise cancels between peers; or all"
        colluding = answer("colluding", text, _helpers(peers), ALL)
    if colluding is not None and own:
        text = "A number of examples that every peer has at least, and everybody may know"
        own["at_least"] = answer("at_least", text, _whole(1))
    rounds = answer("rounds", "Number of rounds", _whole(1), "50")
    if unused:
        # An option that is left aside in silence would be taken for one that holds.
        names = ", ".join(sorted(option(name.replace("_", "-")) for name in unused))
        raise ScenarioError(
            f"{names} has no use with {option('data', data)} and the other answers: leave it out, or change "
            f"{_owner_of(unused, data)}",
            code="init.unused",
        )
    return Answers(data, peers, rounds, epsilon, colluding, **own)


def _owner_of(unused: set[str], data: str) -> str:
    """Return the options on which others depend that are of no use."""
    if unused & {"root", "test"} or (unused == {"target"}):
        return f"{option('data')} (to {TABLE}, or {IMAGES})"
    if "colluding" in unused:
        return option("epsilon")
    return option("colluding")


def _one_of_data(text: str) -> str:
    if text not in DATA:
        raise typer.BadParameter(f"{shown(text)} must be one of {', '.join(DATA)}")
    return text


def _with_peer(text: str) -> str:
    if PEER in text:
        return text

    # Files that have names of their own, in place of numbers.
    files = _files_named(text)
    remedy = f": site-{PEER}.csv"
    if files:
        numbered = files[0].with_name(f"site-0{files[0].suffix}")
        own = [file.name for file in files]
        remedy = (
            f", counted from 0. Give {listed(own, MOST_LISTED)} such names, by copies or links "
            f"(`ln -s {files[0].name} {numbered}` and so on), then answer {numbered.with_stem(f'site-{PEER}')}"
        )
    raise typer.BadParameter(f"{shown(text)} must have {PEER} in it, for the number of a peer{remedy}")


def _files_named(text: str) -> list[Path]:
    """Return the files that somebody means who gives a folder, a pattern as shells have it, or a list with commas."""
    files: list[Path] = []
    for part in text.split(","):
        path = Path(os.path.expanduser(part.strip()))
        if path.is_dir():
            files += path.iterdir()
        else:
            files += map(Path, glob(str(path)))
    return sorted(file for file in files if file.is_file())


def _n_numbered(root: str | None) -> int:
    """Return how many peers, from 0 on, have data of their own on this machine."""
    if root is None:
        return 0
    root = os.path.expanduser(root)
    return next(peer for peer in count() if not os.path.exists(root.replace(PEER, str(peer))))


def _existing(text: str) -> Path:
    path = Path(text)
    if not path.expanduser().exists():
        raise typer.BadParameter(f"{shown(text)} does not exist: give the path of a file or folder that does")
    return path


def _column_of(test: Path) -> Callable[[str], str]:
    """Return what reads the name of a column of a table, so that a slip is asked about at once."""

    def read(text: str) -> str:
        try:
            _texts_of(test, text)
        except ScenarioError as error:
            if error.code != "init.target":
                raise
            raise typer.BadParameter(str(error)) from error
        return text

    return read


def _whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < least:
            raise typer.BadParameter(f"{shown(text)} must be a whole number of at least {least}")
        return int(text)

    return read


def _epsilon(text: str) -> float | None:
    if text.strip().lower() == "none":
        return None
    try:
        epsilon = float(text)
    except ValueError:
        epsilon = math.nan
    if not (0 < epsilon < math.inf):
        raise typer.BadParameter(f"{shown(text)} must be a number above 0, or none")
    return epsilon


def _helpers(peers: int) -> Callable[[str], int | None]:
    def read(text: str) -> int | None:
        if text.strip().lower() == ALL:
            return None
        if not text.strip().isdecimal() or int(text) > peers - 2:
            raise typer.BadParameter(f"{shown(text)} must be all, or 0 to {peers - 2}: fewer than the other peers")
        return int(text)

    return read


# --- the files ---


def write_scenario(path: Path, answers: Answers) -> list[str]:
    """Write a first scenario and its schema, and return what a user should know about them.

    Raises:
        ScenarioError: the public test set cannot be read, or the scenario is none; nothing is written then.
    """
    notes: list[str] = []
    text = scenario_text(path, answers, notes)
    scenario = parse_scenario(text, where=str(path), folder=path.parent)
    if answers.data != DIGITS:
        notes += _problems(scenario)
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(SCHEMA_FILE).write_text(schema_text("scenario"), encoding="utf-8")
        path.write_text(text, encoding="utf-8")
    return notes


def _problems(scenario: Scenario) -> list[str]:
    """Read the public test set as a run would, and return what is still to be done.

    Raises:
        ScenarioError: a table cannot be read, which only its owner can mend.
    """
    try:
        Agreement.of(scenario)
    except ScenarioError as error:
        if scenario.data.dataset == TABLE:
            raise
        # Keys such as images.window are nobody's answer here, and belong into the file that is written.
        return [f"to mend in the scenario before a run: {error}"]
    return []


def _from_folder(text: str, folder: Path) -> str:
    """Return a path that is given where the command runs, as a scenario in a folder names it."""
    if os.path.isabs(os.path.expanduser(text)):
        return text
    relative = os.path.relpath(text, folder)
    if relative == PEER:
        # By itself it would not be read as a path.
        return os.path.join(os.curdir, PEER)
    return relative


def check_free(path: Path) -> None:
    """Raise ScenarioError if a scenario may not be written to a path."""
    if path.suffix not in (".yaml", ".yml"):
        raise ScenarioError(f"{path}: must end in .yaml; give {path.with_suffix('.yaml')}", code="init.suffix")
    if path.exists():
        raise ScenarioError(f"{path}: exists; give another path, or remove it", code="init.exists")


def scenario_text(path: Path, answers: Answers, notes: list[str]) -> str:
    """Return the YAML of a scenario for a path; what a user should know about it is added to `notes`."""
    table = None
    if answers.data == TABLE and answers.test is not None and answers.target is not None:
        table = PublicTable(answers.test, answers.target)
    task: dict[str, Any] = {}
    model = {"name": "softmax"}
    if answers.data == IMAGES:
        model = {"name": "cnn"}
    elif table is not None and table.learns_numbers:
        model = {"name": "linear"}
        task = {"task": {"loss": "mse"}}

    data = _data(answers, table, path.parent)
    evaluation: dict[str, Any] = {"every": max(1, answers.rounds // 10)}
    if table is not None and table.metrics:
        task = {"task": {"metrics": table.metrics}}
        evaluation["by_class"] = True

    sections = {
        "name": path.stem,
        "n_peers": answers.peers,
        "rounds": answers.rounds,
        "data": data,
        **task,
        "model": model,
        "algorithm": {"name": "privsgp", "learning_rate": 1.0},
        "topology": {"name": "directed-exponential"},
        "privacy": _privacy(answers),
        "evaluation": evaluation,
    }
    if answers.data != DIGITS and answers.epsilon is not None:
        # A run spends its ε once. If its noise came from keys, nobody could be given the model that it was spent on.
        sections["compute"] = {"generator": "system"}
    lines = [
        f"# yaml-language-server: $schema={SCHEMA_FILE}",
        "# `privdec plan` says what a run of it costs, and `privdec list` what else can be named.",
    ]
    for line in write_yaml(sections, allow_unicode=True).splitlines():
        key = line.partition(":")[0]
        if key in COMMENTS:
            lines += ["", f"# {COMMENTS[key]}"]
        lines.append(line)
    if table is not None:
        notes += table.notes
    return "\n".join(lines) + "\n"


def _privacy(answers: Answers) -> Any:
    if answers.epsilon is None:
        return "none"
    # δ has to be well below 1 / (a peer's examples): those of the digits are few, and public.
    delta = 1e-5
    if answers.data == DIGITS:
        delta = 1e-3
    privacy: dict[str, Any] = {"epsilon": answers.epsilon, "delta": delta}
    if answers.colluding is not None:
        privacy["noise"] = {"kind": "cancelling", "colluding": answers.colluding}
    return privacy


def _data(answers: Answers, table: PublicTable | None, folder: Path) -> dict[str, Any]:
    """Return the section `data` of a scenario that lies in a folder."""
    if answers.test is None or answers.root is None:
        return {"dataset": answers.data, "batch": {"size": 45}}

    data: dict[str, Any] = {
        "dataset": answers.data,
        "root": _from_folder(answers.root, folder),
        "test": _from_folder(str(answers.test), folder),
    }
    if table is None:
        data["labels"] = _class_folders(answers.test)
    else:
        data |= table.keys()
    data["batch"] = {"rate": 0.1}
    if answers.at_least is not None:
        # Noise that cancels is calibrated to one expected size of batches at all peers.
        data["at_least"] = answers.at_least
        data["batch"] = {"size": max(1, answers.at_least // 10)}
    return data


def _class_folders(root: Path) -> list[str]:
    """Return the names of the folders of classes.

    Raises:
        ScenarioError: there are fewer than two.
    """
    folders: list[str] = []
    root = Path(os.path.expanduser(root))
    if root.is_dir():
        folders = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(folders) < 2:
        raise ScenarioError(
            f"{option('test', root)}: has {len(folders)} folders and must have one for each class", code="init.classes"
        )
    return folders


def _texts_of(path: Path, target: str) -> Texts:
    """Return the columns of a public table as texts.

    Raises:
        ScenarioError: it cannot be read, has no rows, or lacks the target.
    """
    texts = read_texts(os.path.expanduser(path), option("test", path), target)
    if composed(target.strip()) not in texts.columns:
        names = list(texts.columns)
        raise ScenarioError(
            f"{option('target', target)} must be a column of {path}, which has {listed(names)}"
            f"{did_you_mean(target, names)}",
            code="init.target",
        )
    return texts


class PublicTable:
    """The public test set of a table, and what its columns are."""

    def __init__(self, path: Path, target: str) -> None:
        """Read it.

        Raises:
            ScenarioError: it cannot be read, has no rows, or lacks the target.
        """
        self._path = path
        self._target = composed(target.strip())
        texts = _texts_of(path, target)
        self._encoding = texts.encoding
        self._delimiter = texts.delimiter

        self._columns: dict[str, list[str]] = {}  # without the missing values
        for name, values in texts.columns.items():
            self._columns[name] = [text for text in values if text is not None]
        counts = [len(values) for name, values in self._columns.items() if values and name != self._target]
        self._has_gaps = any(count < texts.n_rows for count in counts)

        # How numbers are written here: as most columns can be read.
        self._as_numbers = {name: TextColumn(values) for name, values in self._columns.items()}
        self._decimal, self._thousands = max(MARKS, key=self._n_numbers)
        self._has_spellings = False

        self._check_texts()
        self.notes: list[str] = []
        self.metrics: list[str] = []  # for classes of which one is rare

    def _check_texts(self) -> None:
        """Refuse control characters, which no scenario may name.

        Raises:
            ScenarioError: a name or a text has one.
        """
        for name, texts in self._columns.items():
            whole = name + "".join(texts)
            if whole.isprintable():
                continue
            control = next((sign for sign in whole if sign not in "\n\t" and category(sign) in CONTROL), None)
            if control is not None:
                raise ScenarioError(
                    f"{option('test', self._path)}: column {shown(name)} holds the control character {control!r}: "
                    "save the file again as text without it",
                    code="init.control",
                )

    def _n_numbers(self, marks: tuple[str, str | None]) -> int:
        """Return how many columns are numbers if they are written with these marks."""
        return sum(bool(column.numbers(*marks)) for column in self._as_numbers.values())

    def _numbers(self, name: str) -> list[float] | None:
        """Return the numbers that all texts of a column are; None if one is none, or there is no text."""
        return self._as_numbers[name].numbers(self._decimal, self._thousands) or None

    def keys(self) -> dict[str, Any]:
        """Return `labels`, if the target is a class, and `table`."""
        table: dict[str, Any] = {"target": self._target}
        if self._delimiter != ",":
            table["delimiter"] = self._delimiter
        if self._encoding != "utf-8":
            table["encoding"] = self._encoding
        self._name_marks(table)
        numbers: dict[str, list[float]] = {}
        categories: dict[str, list[str]] = {}
        for name, texts in self._columns.items():
            if name == self._target:
                continue
            values = self._numbers(name)
            why = None
            if not texts:
                why = "it has no value"
            elif values is not None:
                why = _no_feature(name, values)
            else:
                why = self._no_categories(texts)
            if why is not None:
                self.notes.append(f"column {name!r} is left out: {why}")
            elif values is not None:
                numbers[name] = _center_and_scale(values)
                self._note_codes(name, values)
            else:
                categories[name] = self._spelt_once(sorted(set(texts)))
        if not numbers and not categories:
            reasons = "".join(f"; {note}" for note in self.notes)
            raise ScenarioError(
                f"{option('test', self._path)}: has no column to learn {self._target!r} from{reasons}: give a table "
                "with numbers, or with categories",
                code="init.columns",
            )
        table |= {key: value for key, value in (("numbers", numbers), ("categories", categories)) if value}
        if self._has_gaps:
            table["missing"] = "flag"
        learned = self._learned(table)
        if self._has_spellings:
            table["ignore_case"] = True
            self.notes.append(
                "capitals and small letters are the same in all columns, as some texts differ only in them"
            )

        self.notes.append("centers, scales, categories and classes are those of the public test set: read them through")
        return {**learned, "table": table}

    def _spelt_once(self, texts: list[str]) -> list[str]:
        """Return texts without those that differ from one before only in capitals, as a run then reads them alike."""
        by_folded: dict[str, str] = {}
        for text in texts:
            by_folded.setdefault(" ".join(text.casefold().split()), text)
        if len(by_folded) < len(texts):
            self._has_spellings = True
        return list(by_folded.values())

    def _no_categories(self, texts: list[str]) -> str | None:
        """Return why a column of texts has no categories from which anything is learned; None if it may have."""
        distinct = set(texts)
        example = shown(min(distinct))
        if all(DATE.fullmatch(text) or CLOCK.fullmatch(text) for text in distinct):
            return (
                f"it has dates or times, such as {example}: to learn from it, save it as a number, such as days since "
                "a public date"
            )
        if len(distinct) <= MOST_CATEGORIES:
            return None

        why = f"it has {len(distinct)} different texts, such as {example}"
        read = reader(self._decimal, self._thousands)
        others = []
        for text in sorted(distinct):
            number = read(text)
            if number is None or not math.isfinite(number):
                others.append(text)
        if len(others) < len(distinct) / 2:
            return (
                f"most of it are numbers, and {shown(others[0])} is none: to learn from it, mend such values, or empty "
                "them if they are missing"
            )
        if all(WITH_UNIT.fullmatch(text) for text in others):
            why += ": to learn from it, save the numbers without units and signs, in one unit"
        return why

    def _note_codes(self, name: str, values: Sequence[float]) -> None:
        """Note numbers that may be no measurements: one that stands for a missing value, or those that count rows."""
        whole = np.array(values)
        if _numbers_each_row(values) and np.ptp(whole) == len(whole) - 1:
            self.notes.append(f"column {name!r} counts rows, as an id does: if it is one, take it out of data.table")

        for code in sorted(CODES & {float(whole.min()), float(whole.max())}):
            others = whole[whole != code]
            if len(others) and np.abs(others - code).min() > np.ptp(others):
                self.notes.append(
                    f"column {name!r} has {code:g} in {np.count_nonzero(whole == code)} rows, far from the others: if "
                    f"it stands for a missing value, add it to data.table.missing_codes.{name}, set "
                    "data.table.missing=flag, and mend the column's center and scale"
                )

    def _name_marks(self, table: dict[str, Any]) -> None:
        """Name the marks of numbers, if they are not the usual ones."""
        if (self._decimal, self._thousands) == MARKS[0]:
            return
        table["decimal"] = self._decimal
        keys = f"decimal={self._decimal!r}"
        if self._thousands is not None:
            table["thousands"] = self._thousands
            keys += f" and thousands={self._thousands!r}"
        self.notes.append(f"numbers are read with {keys}, which fits most columns of the public test set")

    @property
    def learns_numbers(self) -> bool:
        """Whether the target is a number, rather than a class."""
        texts = self._columns[self._target]
        return self._numbers(self._target) is not None and len(set(texts)) > MOST_CLASSES

    def _learned(self, table: dict[str, Any]) -> dict[str, Any]:
        """Return the classes; of a target that is a number, note its scale in the table instead."""
        texts = self._columns[self._target]
        values = self._numbers(self._target)
        if self.learns_numbers and values is not None:
            table["target_scale"] = _center_and_scale(values)
            self.notes.append(f"{self._target!r} is learned as a number: it has {len(set(values))} different ones")
            return {}

        classes = self._spelt_once(sorted(set(texts)))
        if values is not None:
            number = dict(zip(texts, values, strict=True))
            classes.sort(key=number.__getitem__)
        if len(classes) < 2:
            raise ScenarioError(
                f"{option('target', self._target)}: has {len(classes)} classes in {self._path} and needs two at least: "
                "name another column, or give a public test set with rows of all classes",
                code="init.classes",
            )
        self.notes.append(f"{self._target!r} is learned as a class: {listed(classes, MOST_LISTED)}")
        self._choose_metrics(texts)
        return {"labels": classes}

    def _choose_metrics(self, texts: Sequence[str]) -> None:
        """Choose other metrics than the accuracy if a class is so rare that always naming another is right mostly."""
        by_class = Counter(" ".join(text.casefold().split()) for text in texts)
        rarest = min(by_class, key=by_class.__getitem__)
        if by_class[rarest] >= RARE * len(texts) / len(by_class):
            return

        self.metrics = ["balanced-accuracy", "accuracy"]
        if len(by_class) == 2:
            self.metrics = ["roc-auc", "average-precision", "accuracy"]
        always = max(by_class.values()) / len(texts)
        self.notes.append(
            f"{rarest!r} is rare, {by_class[rarest]:,} of {len(texts):,} rows: task.metrics begins with "
            f"{self.metrics[0]}, because always naming the most frequent class is right in {100 * always:.1f} %"
        )


def _no_feature(name: str, values: Sequence[float]) -> str | None:
    """Return why a column of numbers is no feature; None if it may be one."""
    if max(map(abs, values)) > LARGEST:
        return "it has numbers that float32 cannot hold"

    words = re.split(r"[\W_]+|(?<=[a-z])(?=[A-Z])", name.strip())
    if words[-1].casefold() in ID_WORDS and _numbers_each_row(values):
        return (
            "each row has a whole number of its own, and by its name it is an id; if not, add it to data.table.numbers"
        )
    return None


def _numbers_each_row(values: Sequence[float]) -> bool:
    """Return whether each row has a whole number of its own, by which a model may learn it by heart."""
    is_whole = all(value.is_integer() for value in values)
    return len(values) >= LEAST_IDS and is_whole and len(set(values)) == len(values)


def _center_and_scale(values: Sequence[float]) -> list[float]:
    """Return the mean and the deviation, with as few digits as change no feature much."""
    scale = float(f"{np.std(values):.3g}")
    if min(values) == max(values) or scale == 0:
        return [values[0], 1.0]

    # The center by the scale: three digits of a year are ten years.
    decimals = 2 - math.floor(math.log10(scale))
    return [round(float(np.mean(values)), decimals), scale]
