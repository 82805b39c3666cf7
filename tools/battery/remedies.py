"""Follow the remedies of refusals, as a user would who does what the line says.

A line is read by a few forms: `set K=V`, `leave K out`, `remove it`, `K must be V`, `use X or Y`, `raise it`, `give one
a peer`. A name that is recommended belongs to the key that the line is about, or to the catalogue that has it.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from flower_privdec.algorithms import ALGORITHMS
from flower_privdec.algorithms.tables import GRADIENT_TABLES
from flower_privdec.common import catalogue
from flower_privdec.common.errors import PrivdecError
from flower_privdec.scenario import DescentSection
from tools.battery.laws import Violation, refusal_of, try_case, violation
from tools.battery.levels import RATE
from tools.battery.rows import Case, Data

MOST = 24  # builds, until a row counts as one whose remedies do not work
DEEPEST = 7  # remedies, one after the other
VOCABULARY: dict[
    str, Container[str]
] = {  # where a name that is recommended belongs, if it is no value of the key that the line is about
    "algorithm.name": ALGORITHMS,
    "topology.name": catalogue.TOPOLOGIES,
    "topology.weights": catalogue.WEIGHTS,
    "model.name": catalogue.MODELS,
    "task.loss": catalogue.LOSSES,
    "task.metrics": catalogue.METRICS,
    "data.batch.sampling": catalogue.SAMPLINGS,
    "data.partition.kind": catalogue.PARTITIONS,
    "algorithm.table": GRADIENT_TABLES,
    "participation.kind": catalogue.PARTICIPATIONS,
}
PHRASES: dict[str, Data] = {
    "push-sum": {"algorithm.name": "privsgp", "topology.weights": "column-stochastic"},
    "undirected": {"topology.name": "ring"},
    "calibration rigorous": {"privacy.calibration": "rigorous"},
    "without hardened": {"privacy.hardened": None},
}
VALUES: Data = {  # of keys that a line asks for without a value
    "data.batch.size": 5,
    "data.batch.rate": 0.2,
    "privacy.epsilon": 3.0,
    "privacy.paper.phi_min": 0.2,
    "data.at_least": 6,
    "data.source": "ward",
    "evaluation.private": "ignored",
}
KEY = r"[a-z_]+(?:\.[a-z_0-9]+)*"


@dataclass(frozen=True)
class Remedy:
    """What to change: values by dotted key, None to remove a key; `@runtime` is where the scenario runs."""

    changes: tuple[tuple[str, Any], ...]


def follow(case: Case, error: PrivdecError, *, before_runtime: bool = True) -> Violation | None:
    """Follow the remedies of a refusal, and of those that come after it, until the row is no longer refused.

    Args:
        before_runtime: whether the row is refused before anything runs.

    Returns:
        None; a violation if no chain of remedies leads there.
    """
    left = [MOST]
    chain: list[str] = []

    def refused(tried: Case) -> PrivdecError | None:
        left[0] -= 1
        if before_runtime:
            return refusal_of(tried)
        outcome = try_case(tried)
        return None if outcome.is_late else outcome.refusal

    def works(tried: Case, refusal: PrivdecError, deep: int, seen: frozenset[str]) -> bool:
        if not chain or len(chain) < DEEPEST:
            chain.append(f"{refusal.code}: {refusal}")
        for remedy in remedies(str(refusal), tried):
            if left[0] <= 0 or deep == 0:
                return False
            changed = applied(tried, remedy)
            state = f"{changed.names['runtime']} {changed.data()}"
            if state in seen:
                continue
            other = refused(changed)
            if other is None or works(changed, other, deep - 1, seen | {state}):
                return True
        return False

    if works(case, error, DEEPEST, frozenset()):
        return None
    return violation(case, "remedies work", "\n    ".join(chain))


def applied(case: Case, remedy: Remedy) -> Case:
    """Return a row with a remedy's changes."""
    changed, removed = dict(case.changed), set(case.removed)
    names = dict(case.names)
    for key, value in remedy.changes:
        if key == "@runtime":
            names["runtime"] = value
            continue
        for other in [one for one in changed if one == key or one.startswith(f"{key}.")]:
            del changed[other]
        if value is None:
            removed.add(key)
            changed = _without(changed, key)
            continue
        removed = {one for one in removed if one != key and not one.startswith(f"{key}.")}
        section, _, leaf = key.partition(".")
        if key == "algorithm.name":
            changed["algorithm"] = {"name": value}
            if issubclass(ALGORITHMS[value].Section, DescentSection):
                changed["algorithm"]["learning_rate"] = RATE
            removed |= {one for one in case.settings() if one.startswith("algorithm.")}
        elif leaf == "name":
            changed[section] = {"name": value}
            removed |= {one for one in case.settings() if one.startswith(f"{section}.") and one != key}
        elif leaf == "partition.kind":
            changed["data.partition"] = {"kind": value}
        elif key == "data.batch.sampling":
            changed["data.batch"] = {"sampling": value} if value == "full" else {"sampling": value, "size": 5}
        elif key == "participation.kind":
            changed["participation"] = {"kind": value}
        elif key == "task.metrics":
            changed[key] = [value]
        else:
            changed[key] = value
    return Case(names, case.folder, case.number, changed, removed, is_varied=True)


def _without(changed: Data, key: str) -> Data:
    """Return changes without a key, of which a section that was changed as a whole may hold the last part."""
    section, _, leaf = key.rpartition(".")
    value = changed.get(section)
    if isinstance(value, dict) and leaf in value:
        return {**changed, section: {name: part for name, part in value.items() if name != leaf}}
    return changed


def remedies(line: str, case: Case) -> Iterator[Remedy]:
    """Yield what a line recommends, in its order."""
    text = re.sub(r" \(and \d+ more\)$", "", line)
    data = case.data()
    about = _subject(text, data)

    unknown = re.search(r"unknown key '([\w.]+)'", text)
    if unknown:
        yield Remedy(((unknown[1], None),))

    yield from _runtimes(text)
    yield from _settings(text, data, about)
    yield from _removals(text, data, about)
    yield from _numbers(text, data, about)
    yield from _names(text, about)


def _runtimes(text: str) -> Iterator[Remedy]:
    """Yield another place to run in, which a command or a mode of Flower stands for."""
    if "`privdec run`" in text:
        yield Remedy((("@runtime", "engine"),))
    if "leave mode out" in text:
        yield Remedy((("@runtime", "cohort"),))


def _subject(text: str, data: Data) -> str:
    """Return the key that a line is about: the first one in it that the scenario may have."""
    sections = "|".join([*data, "features"])
    match = re.search(rf"(?:^|[ :])((?:{sections})(?:\.[a-z_]+)*)(?:=|: ([a-z_]+)[ =]| |$)", text)
    if match is None:
        return ""
    key = match[1]
    inner = match[2]
    return f"{key}.{inner}" if inner and isinstance(_value(data, key), dict) else key


def _value(data: Data, key: str) -> Any:
    value: Any = data
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _full(key: str, data: Data, about: str) -> str:
    """Return the whole path of a key that a line names by its last part."""
    if "." in key or key in data or key == "features":
        return key
    section = about.rpartition(".")[0] or about
    for candidate in (f"{section}.{key}", f"{about}.{key}", *(f"{name}.{key}" for name in data)):
        if _value(data, candidate) is not None or candidate in VALUES:
            return candidate
    return f"{section}.{key}"


def _settings(text: str, data: Data, about: str) -> Iterator[Remedy]:
    """Yield what is to be set to a value."""
    for match in re.finditer(
        rf"\bset ({KEY})=([^\s,;]+?)(?: and (?!leave)({KEY}))?(?=[\s,;]|$)(?:,? and leave ({KEY}) out)?", text
    ):
        changes = [(match[1], yaml.safe_load(match[2]))]
        if match[3]:
            changes.append((match[3], VALUES[match[3]]))
        if match[4]:
            changes.append((match[4], None))
        yield Remedy(tuple(changes))
    for match in re.finditer(rf"(?:set|say|use) ({KEY})(?:: | to |=)([\w-]+)", text):
        if match[1] == "its":
            continue
        yield Remedy(((_full(match[1], data, about), yaml.safe_load(match[2])),))
    for match in re.finditer(r"set its (\w+) to ([\w-]+)", text):
        yield Remedy(((f"algorithm.{match[1]}", match[2]),))
    for match in re.finditer(rf"(?:give|add|needs|set) ({KEY})\b", text):
        key = _full(match[1], data, about)
        if key in VALUES:
            yield Remedy(((key, VALUES[key]),))
    if about in VALUES and re.search(r"is missing|add it|give the value", text):
        yield Remedy(((about, VALUES[about]),))


def _removals(text: str, data: Data, about: str) -> Iterator[Remedy]:
    """Yield what is to be left out."""
    pattern = rf"\b(?:leave ({KEY}) out|leave out ({KEY})|remove (?:the section )?({KEY})|({KEY}) must be left out)"
    for match in re.finditer(pattern, text):
        key = next(group for group in match.groups() if group)
        if key in ("it", "them"):
            key = about
        yield Remedy(((_full(key, data, about), None),))
    if re.search(r"\bmust be left out", text) and about:
        yield Remedy(((about, None),))


def _numbers(text: str, data: Data, about: str) -> Iterator[Remedy]:
    """Yield numbers that are larger or smaller, or as many as there are peers."""
    value = _value(data, about)
    if "must have an undirected graph" in text:
        yield Remedy((("topology.name", "ring"), ("participation.kind", "all")))
    server = re.search(r"must be on topology ([a-z-]+)", text)
    if server:
        yield Remedy((("topology.name", server[1]),))
    exact = re.search(r"must be (\d+|all|none)\b", text)
    if exact:
        yield Remedy(((about, yaml.safe_load(exact[1])),))
    if re.search(r"give one a peer|give each", text) and isinstance(value, list):
        count = data["n_peers"]
        yield Remedy(((about, (value * count)[:count]),))
    for match in re.finditer(rf"\b(raise|lower) ({KEY})(?: or ({KEY}))?", text):
        for key in filter(None, (match[2], match[3])):
            path = about if key == "it" else _full(key, data, about)
            number = _value(data, path)
            factor = 3.0 if match[1] == "raise" else 1 / 8
            if isinstance(number, list):
                yield Remedy(((path, [type(one)(one * factor) for one in number]),))
            elif isinstance(number, int | float):
                yield Remedy(((path, type(number)(number * factor) or 1),))


def _names(text: str, about: str) -> Iterator[Remedy]:
    """Yield names that are recommended."""
    for match in re.finditer(r"\b(?:use|take|or|so use) ((?:[^;:]|: (?=\w+$))+)", text):
        advice = match[1]
        for phrase, changes in PHRASES.items():
            if phrase in advice and phrase != "without hardened":
                more = PHRASES["without hardened"] if "without hardened" in advice else {}
                yield Remedy(tuple({**changes, **more}.items()))
        for word in re.findall(r"[a-z][\w*-]*", advice):
            for key in [about, *VOCABULARY]:
                if key in VOCABULARY and word in VOCABULARY[key]:
                    yield Remedy(((key, word),))
                    break
