"""One-line errors with file and line: pydantic's errors in a scenario, and errors about a valid one.

Pydantic reports a *location*, the keys that lead to a value. It also holds the tags of unions that pydantic went
through, which are not keys of the file: `_clean` takes them out. The line of a location is that of its nearest parent
that the file has (`Places`). Every sentence names the value, the rule and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from flower_privdec.common.catalogue import Choice
from flower_privdec.common.errors import ScenarioError, did_you_mean, nearest
from flower_privdec.common.formatting import shown
from flower_privdec.common.registry import PartField, part_field_in

Location = tuple[int | str, ...]
SECTION = "a section, as {key: value}"
QUOTE = "'"
TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text (quote it)",
    "string_too_short": "text that is not empty",
    "too_short": "a list that is not empty",
    "bool_type": "true or false",
    "list_type": "a list, as [1, 2]",
    "dict_type": "a mapping, as {key: value}",
    "model_type": SECTION,
    "model_attributes_type": SECTION,
}
CHOICES: dict[Location, str] = {
    ("privacy",): "none, or a section with epsilon and delta; to train without privacy, write privacy: none",
    ("data", "dataset"): "a name that `privdec list` has, or a section with module",
}


# Keys by the names that they have in other libraries, or that come to mind first.
OTHER_NAMES = {
    "epochs": "rounds",
    "num_rounds": "rounds",
    "n_rounds": "rounds",
    "clients": "n_peers",
    "num_clients": "n_peers",
    "n_clients": "n_peers",
    "nodes": "n_peers",
    "peers": "n_peers",
    "lr": "algorithm.learning_rate",
    "learning_rate": "algorithm.learning_rate",
    "batch_size": "data.batch.size",
    "sample_rate": "data.batch.rate",
    "max_grad_norm": "privacy.clip_norm",
    "l2_norm_clip": "privacy.clip_norm",
    "sigma": "privacy.noise_multiplier",
    "eps": "privacy.epsilon",
    "target_epsilon": "privacy.epsilon",
    "target_delta": "privacy.delta",
    "local_epochs": "algorithm.local_steps",
    "dataset": "data.dataset",
    "device": "compute.device",
    "graph": "topology",
    "optimizer": "algorithm.optimizer",
}


@dataclass(frozen=True, eq=False)
class Places:
    """The file and lines of a scenario's values.

    Attributes:
        where: the path of the text; empty if there is none.
        lines: the line of each key.
        overrides: the keys that were overridden, and by which option.
    """

    where: str = ""
    lines: Mapping[Location, int] = field(default_factory=dict)
    overrides: Mapping[Location, str] = field(default_factory=dict)

    def of(self, loc: Location) -> str:
        """Return `file:line: ` or `--set: ` for a location, by its nearest known parent."""
        # An override is to blame if it set the value, something inside it, or a section around it.
        for path, name in self.overrides.items():
            if loc and loc[: len(path)] == path[: len(loc)]:
                return f"{name}: "

        for end in range(len(loc), 0, -1):
            parent = loc[:end]
            if parent in self.lines:
                return f"{self.where}:{self.lines[parent]}: "
        return f"{self.where}: " if self.where else ""

    def __eq__(self, other: object) -> bool:
        """Two scenarios are equal wherever they were written."""
        return isinstance(other, Places)

    __hash__ = None  # type: ignore[assignment]


def key_of(sentence: str) -> Location:
    """Return the key that a sentence begins with."""
    word = re.split(r"[ =:,]", sentence, maxsplit=1)[0]
    return tuple(word.strip("'").split("."))


@contextmanager
def located(places: Places, root: type[BaseModel]) -> Iterator[None]:
    """Add file and line to errors raised inside that begin with a key of a scenario's class."""
    try:
        yield
    except ScenarioError as error:
        sentence = str(error)
        key = key_of(sentence)
        place = places.of(key) if key[0] in root.model_fields else ""
        if not place:
            raise
        raise ScenarioError(place + sentence, code=error.code) from error


def _clean(error: Any, data: Any) -> Location:
    """Return the location of an error of pydantic, without the tags of unions.

    Args:
        data: the plain data, which have every part of the location but tags, and the last one if that is missing.
    """
    loc: Location = error["loc"]
    path: list[int | str] = []
    for i, part in enumerate(loc):
        is_last = i == len(loc) - 1
        if isinstance(data, dict):
            is_present = part in data
        else:
            is_present = isinstance(data, list) and isinstance(part, int) and part < len(data)

        if is_present:
            path.append(part)
            data = data[part]
        elif is_last and error["type"] == "missing":
            path.append(part)
    return tuple(path)


def _model_at(loc: Location, root: type[BaseModel], data: Any) -> type[BaseModel]:
    """Return the section model in which pydantic's location lies."""
    models: list[type[BaseModel]] = [root]  # that the section may be, by the parts of the location so far
    for part in loc:
        field = models[0].model_fields.get(str(part))
        if isinstance(data, dict):
            data = data.get(part, data)  # a tag is not a key of the data

        if field:
            matching = _forms_of(field, data)
        elif part in ("own", "named"):
            is_own = part == "own"
            matching = [model for model in models if ("module" in model.model_fields) == is_own]
        else:
            matching = [model for model in models if part in _tags(model)]
        if matching:  # else it is the number of an item of a list
            models = matching
    return models[0]


def _tags(model: type[BaseModel]) -> Sequence[Any]:
    """Return the names that select a form of a section."""
    field = model.model_fields.get("name") or model.model_fields.get("kind")
    if field is None:
        return ()
    for extra in field.metadata:
        if isinstance(extra, Choice):
            return list(extra)
    return get_args(field.annotation)  # of a Literal


def _part_of(field: FieldInfo) -> PartField | None:
    return part_field_in(field.annotation, field.metadata)


def _forms_of(field: FieldInfo, data: Any = None) -> list[type[BaseModel]]:
    """Return the section models a field may hold; only the one that plain data choose, if they choose a part."""
    part = _part_of(field)
    if part is None:
        return _sections_of(field.annotation)

    chosen = part.form_of(data)
    if chosen is not None:
        return [chosen]
    return [*part.forms()]


def _sections_of(annotation: Any) -> list[type[BaseModel]]:
    """Return the section models a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]

    found: list[type[BaseModel]] = []
    for inner in getattr(annotation, "__args__", ()):
        found += _sections_of(inner)
    return found


def _elsewhere(key: str, root: type[BaseModel], path: str = "") -> str | None:
    """Return the whole name of a key that belongs to a section; None if it belongs to none."""
    for name, info in root.model_fields.items():
        for section in _forms_of(info):
            if key in section.model_fields:
                return f"{path}{name}.{key}"
            inner = _elsewhere(key, section, f"{path}{name}.")
            if inner is not None:
                return inner
    return None


def whole_key(word: str, root: type[BaseModel]) -> str | None:
    """Return the whole name of the key that a word means by itself, or by its name in another library; None for no key.

    Of a section that is chosen by a name, it is the key of that name.

    Examples:
        >>> from flower_privdec.scenario.sections import Scenario
        >>> [whole_key(word, Scenario) for word in ("epsilon", "lr", "n-peers", "algorithm", "zzz")]
        ['privacy.epsilon', 'algorithm.learning_rate', 'n_peers', 'algorithm.name', None]
    """
    key = word.replace("-", "_")
    field = root.model_fields.get(key)
    if field is None:
        return OTHER_NAMES.get(key) or _elsewhere(key, root)

    for form in _forms_of(field):
        for choice in ("name", "kind"):
            if choice in form.model_fields:
                return f"{key}.{choice}"
    return key


def _section_with(where: Location, root: type[BaseModel], data: Any) -> Any:
    """Return the field of the section that a key stands in; None for a key at the root."""
    if len(where) < 2:
        return None
    return _model_at(where[:-2], root, data).model_fields.get(str(where[-2]))


def _unknown_key(error: Any, loc: Location, root: type[BaseModel], data: Any) -> str:
    """Return the sentence about a key that its section does not have, with the key that was probably meant."""
    where = error["loc"]
    key = str(where[-1])
    fields = _model_at(where[:-1], root, data).model_fields
    names = [field.alias or name for name, field in fields.items()]

    # Keys that belong to other choices of the same section. A section that is always the same has no other choice.
    section = _section_with(where, root, data)
    forms = _forms_of(section) if section else []
    others = forms if len(forms) > 1 else []
    takers = [str(tag) for form in others if key in form.model_fields for tag in _tags(form)]

    # The nearest explanation first: a slip in this section, another choice, another section, a slip in another choice.
    hint = did_you_mean(key, names)
    meant = OTHER_NAMES.get(key)
    if meant is not None:
        is_slip_here = bool(hint) and meant.rpartition(".")[2] in names  # which names the key as it is written here
        if not is_slip_here:
            hint = f"; did you mean '{meant}'?"
    if not hint and key == "arguments":
        hint = "; its keys stand in the section itself"
    if not hint and "arguments" in names:
        # The section names a module of a user's own: its keys are not known here.
        hint = "; what a module of your own takes lies under arguments"
    if not hint and takers:
        hint = f"; it belongs to {', '.join(takers)}"
    if not hint:
        elsewhere = _elsewhere(key, root)
        if elsewhere is not None:
            hint = f"; did you mean '{elsewhere}'?"
    if not hint:
        hint = did_you_mean(key, {name for form in others for name in form.model_fields})

    path = ".".join(map(str, loc))
    return f"unknown key '{shown(path)[1:-1]}'{hint} (valid keys: {', '.join(names)})"


def _sentence(error: Any, loc: Location, root: type[BaseModel], data: Any) -> str:
    """Return the value, the rule and the remedy of an error of pydantic."""
    name = ".".join(map(str, loc)) or root.__name__.lower()
    kind = error["type"]
    context = error.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(error, loc, root, data)

    if kind == "union_tag_invalid":
        tags = re.findall(r"'([^']+)'", context["expected_tags"])
        key = f"{name}.{context['discriminator'].strip(QUOTE)}"
        tag = context["tag"]
        return f"{key}='{tag}' must be one of {', '.join(tags)}{did_you_mean(tag, tags)}"

    if kind == "missing":
        return f"'{name}' is missing; add it"
    if kind == "union_tag_not_found":
        return f"'{name}.{context['discriminator'].strip(QUOTE)}' is missing; add it"

    if kind == "value_error":  # of our own rules, which say all but where they are
        message = str(context.get("error"))
        if not loc or message.startswith(f"{name}."):
            return message
        if message.startswith("must"):
            return f"{name}={shown(error['input'])} {message}{number_meant(error['input'])}"
        return f"{name}: {message}"

    field = None
    if loc:
        field = _model_at(loc[:-1], root, data).model_fields.get(str(loc[-1]))
    return f"{name}={shown(error['input'])} must be {_rule(error, loc, field)}"


WRITTEN_NUMBER = re.compile(
    r"\s*(?P<whole>[+-]?[0-9][0-9_']*)(?P<part>[.,][0-9]+)?(?P<exponent>[eE][+-]?[0-9]+)?\s*(?P<share>%?)\s*"
)


def number_meant(value: Any, *, whole: bool = False) -> str:
    """Return the end of an error about a value that is no number, if one was meant; else nothing.

    Args:
        whole: whether it has to be a whole number.

    Examples:
        >>> number_meant("3.0"), number_meant("4,0"), number_meant("0.1%")
        ('; write 3, without quotes', '; write 4, with a point and no comma', '; write 0.001, no percentage')
        >>> number_meant(1e3, whole=True), number_meant("low")
        ('; write 1000', '')
    """
    if whole and isinstance(value, float):
        if not value.is_integer() or abs(value) >= 1e15:
            return ""
        return f"; write {value + 0:.0f}"  # + 0 turns -0 into 0
    if not isinstance(value, str):
        return ""
    match = WRITTEN_NUMBER.fullmatch(value)
    if match is None or len(value) > 40:
        return ""

    digits = re.sub("[_']", "", match["whole"])
    number = float(digits + (match["part"] or "").replace(",", ".") + (match["exponent"] or ""))
    why = "without quotes"
    if match["share"]:
        number /= 100
        why = "no percentage"
    elif "," in value:
        why = "with a point and no comma"
    if whole and not number.is_integer():
        return ""
    return f"; write {number:.15g}, {why}"


def _rule(error: Any, loc: Location, field: FieldInfo | None) -> str:
    """Return what a value must be, with a remedy unless that says it all."""
    kind = error["type"]
    context = error.get("ctx", {})
    if kind == "literal_error" and loc != ("privacy",):
        words = re.findall(r"'([^']+)'", context["expected"])
        hint = did_you_mean(error["input"], words)
        if error["input"] == "gpu" and "cuda" in words:
            hint = "; did you mean 'cuda'?"
        if len(words) == 1:
            return f"{context['expected']}{hint}"
        return f"one of {context['expected']}{hint}"
    if loc in CHOICES:
        return CHOICES[loc]

    if error["input"] is None:
        remedy = "leave the key out for its default"
        if field is not None and field.is_required():
            remedy = "give one"
        return f"{TYPES.get(kind, 'given')}: {remedy}"

    if isinstance(error["input"], str) and field is not None and TYPES.get(kind) == SECTION:
        return _rule_of_section(error["input"], field)
    if kind == "string_pattern_mismatch":
        return f"as the pattern {context['pattern']} has it"

    # Of the two keys that say how large a batch is, the one is often given the other's value.
    if kind in ("int_type", "int_from_float") and loc[-2:] == ("batch", "size") and isinstance(error["input"], float):
        return f"{TYPES[kind]} of examples; for a share of them give data.batch.rate instead"
    if kind == "less_than_equal" and loc[-2:] == ("batch", "rate"):
        return "<= 1, a share of the examples; for a number of them give data.batch.size instead"

    if kind in TYPES:
        return _rule_of_type(error["input"], kind)
    rule = error["msg"].removeprefix("Input should be ").replace("greater than or equal to", ">=")
    rule = rule.replace("less than or equal to", "<=").replace("greater than", ">").replace("less than", "<")
    return str(rule)


def _rule_of_section(word: str, field: FieldInfo) -> str:
    """Return the rule for a word in place of a section: probably the name of a part, as in `model: softmax`."""
    keys = [key for form in _forms_of(field) for key in ("name", "kind") if key in form.model_fields]
    if not keys:
        return SECTION

    # What is recommended has to work: only a name that there is.
    names = [str(tag) for form in _forms_of(field) for tag in _tags(form)]
    meant: str | None = word
    if names and word not in names:
        meant = nearest(word, names)
    if meant is None:
        return f"{SECTION}, whose {keys[0]} is one of {', '.join(names)}: leave it out, or choose one"
    return f"{SECTION}: write {{{keys[0]}: {shown(meant)[1:-1]}}}"


def _rule_of_type(value: Any, kind: str) -> str:
    """Return the rule for a value of another type than its key's, with what was probably meant."""
    if kind in ("int_type", "int_from_float", "float_type"):
        return TYPES[kind] + number_meant(value, whole=kind != "float_type")
    if kind == "list_type" and isinstance(value, str) and value.isidentifier():
        return f"a list: write [{value}]"  # as `metrics: f1`
    return TYPES[kind]


def _alternatives(first: Any, findings: Sequence[Any], loc: Location, data: Any) -> Sequence[Any]:
    """Return the errors of one value: several if it may be a word or a number, as `auto | number`, and is neither.

    Args:
        first: one of them.
        loc: its location, without tags.
    """
    if first["type"] != "literal_error":
        return [first]
    return [finding for finding in findings if _clean(finding, data) == loc]


def _either(alternatives: Sequence[Any], loc: Location) -> str:
    """Return what a value must be that may be a word or a number, with one remedy."""
    rules = []
    remedies = []
    for error in alternatives:
        rule, _, remedy = _rule(error, loc, None).partition(": ")
        rule, _, hint = rule.partition("; ")
        rules.append(rule)
        if hint:
            remedies.append(f"; {hint}")
        elif remedy:
            remedies.append(f": {remedy}")
    return " or ".join(dict.fromkeys(rules)) + "".join(remedies[:1])


def explain(error: ValidationError, root: type[BaseModel], data: Any, places: Places) -> ScenarioError:
    """Turn pydantic's errors into one: the first, or all keys that are missing, and how many more there are.

    Its code is pydantic's type, below "scenario".
    """
    findings = error.errors()

    # A key that is written wrong explains others that are missing. Rules across sections, which have no location, last.
    first = min(findings, key=lambda item: (item["type"] != "extra_forbidden", len(item["loc"]) == 0))
    loc = _clean(first, data)
    sentence = _sentence(first, loc, root, data)
    n_named = 1
    alternatives = _alternatives(first, findings, loc, data)
    if len(alternatives) > 1:
        n_named = len(alternatives)
        name = ".".join(map(str, loc))
        sentence = f"{name}={shown(first['input'])} must be {_either(alternatives, loc)}"
    if first["type"] == "missing":
        absent = [".".join(map(str, _clean(item, data))) for item in findings if item["type"] == "missing"]
        n_named = len(absent)
        if n_named > 1:
            sentence = f"{', '.join(map(repr, absent))} are missing; add them"

    more = ""
    if len(findings) > n_named:
        more = f" (and {len(findings) - n_named} more)"

    # The sentence of a rule across sections begins with the key that it blames.
    place = places.of(loc or key_of(sentence))
    return ScenarioError(place + sentence + more, code=_code(first, root, data))


def _code(error: Any, root: type[BaseModel], data: Any) -> str:
    """Return the code of an error: that of our own rule, or pydantic's type below "scenario"."""
    rule = error.get("ctx", {}).get("error")
    code = getattr(rule, "code", "")
    if code:
        return str(code)

    where = error["loc"]
    if error["type"] == "extra_forbidden":
        field = _section_with(where, root, data)
        part = None
        if field:
            part = _part_of(field)
        if part is not None and any(where[-1] in form.model_fields for form in part.forms()):
            return part.stray
    return f"scenario.{error['type']}"
