"""The parts that a scenario can name: each is a class that owns its name, its keys and its line of description.

A part of the package is one file in the room of its kind, and nothing else knows it by name. A registry stands on the
lowest floor and imports the modules of that room when it is first asked for a part, so rooms below can validate and
describe a part without importing it themselves. A part of a user's own is the same class in a module outside the
package, which a scenario names as `package.module:Name` (`common.user_code`).

    class Muffliato(Algorithm):
        name = "muffliato"                                     what a scenario calls it
        line = "a noised step, then several gossip steps"      what `privdec list` says of it
        class Section(DescentSection):                         the keys that belong to this choice
            gossip_steps: int = 5

A registry makes the *form* of a section: the keys of the part, and before them the key that chooses it. Forms of parts
with a name have `name`, those of a user's own `module`. Together the forms are a union that is discriminated by name,
in validation, in the JSON schema and in the errors of a scenario.
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from flower_privdec.common.errors import RAISED_BY_USERS, ArgumentError, ScenarioError, did_you_mean
from flower_privdec.common.fields import Section
from flower_privdec.common.formatting import one_line
from flower_privdec.common.user_code import without_tokens


class RegisteredPart(Protocol):
    """What a registry asks of a part's class.

    Attributes:
        name: what a scenario calls it.
        line: what `privdec list` says of it.
        Section: if it has one, declares the keys that belong to this choice.
    """

    name: str
    line: str


def keys_declared_by(part: type[RegisteredPart]) -> type[Section]:
    """Return the class that declares a part's keys: its own Section, or one without keys."""
    declared: type[Section] = getattr(part, "Section", Section)
    return declared


P = TypeVar("P", bound=RegisteredPart)


class Registry(MutableMapping[str, type[P]], Generic[P]):
    """The parts of one kind, by name, in the order of their modules.

    Args:
        key: the key of the scenario that names one: `algorithm.name`.
        room: the package whose modules define them.
        usual: the section whose keys belong to no choice, because most parts have them.
    """

    def __init__(self, key: str, room: str, usual: type[Section]) -> None:
        self.key = key
        self.choice = key.rpartition(".")[2]  # the key inside the section: name or kind
        self.room = room
        self._usual = usual
        self._parts: dict[str, type[P]] = {}
        self._is_complete = False
        self._scanning = threading.RLock()

    def _all(self) -> dict[str, type[P]]:
        """Return all parts; the first call imports the room."""
        # Asked again under the lock: another thread may have imported the room in the meantime.
        if not self._is_complete:
            with self._scanning:
                if not self._is_complete:
                    self._parts = self._scanned()
                    self._is_complete = True
        return self._parts

    def _scanned(self) -> dict[str, type[P]]:
        """Import every module of the room, but none of its packages, and return its parts, by name."""
        package = importlib.import_module(self.room)
        modules = sorted(entry.name for entry in pkgutil.iter_modules(package.__path__) if not entry.ispkg)
        parts: dict[str, type[P]] = {}
        for module in modules:
            name = f"{self.room}.{module}"
            for value in vars(importlib.import_module(name)).values():
                # A part is described where it is defined: what a module imports, or only inherits a line, is none.
                if isinstance(value, type) and value.__module__ == name and "line" in vars(value):
                    self._add(parts, value)
        return parts

    def _add(self, parts: dict[str, type[P]], part: type[P]) -> None:
        """Add a part; refuse one without a name and a line of its own, and a name that another part has."""
        name = vars(part).get("name")
        if not (isinstance(name, str) and name and isinstance(part.line, str) and part.line):
            raise ArgumentError(
                f"{part.__module__}.{part.__qualname__} must have a name and a line of its own, as text: add both",
                code="registry.nameless",
            )
        if name in parts:
            taken = parts[name]
            raise ArgumentError(
                f"{self.key}={name!r} names both {taken.__module__}.{taken.__qualname__} and "
                f"{part.__module__}.{part.__qualname__}: rename one",
                code="registry.taken",
            )
        parts[name] = part

    def __getitem__(self, name: str) -> type[P]:
        """Return the part of a name."""
        return self._all()[name]

    def __setitem__(self, name: str, part: type[P]) -> None:
        """Replace the part of a name, as tests do; a part of the package is found in its room."""
        self._all()[name] = part

    def __delitem__(self, name: str) -> None:
        """Forget a part that was put here by hand."""
        del self._all()[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._all())

    def __len__(self) -> int:
        """Return how many parts there are."""
        return len(self._all())

    @property
    def lines(self) -> dict[str, str]:
        """What `privdec list` says of each name."""
        return {name: part.line for name, part in self.items()}

    def check(self, name: str, key: str = "") -> None:
        """Refuse a name that no part has.

        Raises:
            ScenarioError: the message names the key of the scenario, all names, and the nearest.
        """
        if name not in self:
            message = f"{key or self.key}={name!r} must be one of {', '.join(self)}{did_you_mean(name, self)}"
            raise ScenarioError(message, code="catalogue.unknown")

    def form(self, name: str, more: type[Section] | None = None) -> type[Any]:
        """Return the form of a name's section. Parts that share a Section share its form.

        Args:
            more: a section whose keys stand behind those of the part.
        """
        section = keys_declared_by(self[name])
        sharing = tuple(other for other, part in self.items() if keys_declared_by(part) is section)
        if section is Section:  # the part declares none
            section = self._usual
        return _named_form(section, self.choice, sharing, more)

    def section(self, name: str, more: type[Section] | None = None, **keys: Any) -> Any:
        """Return the section of a part with some of its keys set, as a scenario would have it."""
        return self.form(name, more).model_validate({self.choice: name, **keys})

    def keys_of(self, name: str) -> dict[str, Any]:
        """Return the defaults of the keys that belong to a name; None for those that are required, or others decide."""
        defaults: dict[str, Any] = {}
        for key, field in keys_declared_by(self[name]).model_fields.items():
            if key in self._usual.model_fields:
                continue

            if field.is_required():
                value = None
            else:
                value = field.get_default(call_default_factory=True)
            if isinstance(value, Section):
                value = value.model_dump(exclude_none=True)
            defaults[key] = value
        return defaults


class NamedPart(Section):
    """The key that chooses a part of the package.

    Attributes:
        name: which one.
    """

    name: str


class PartOfKind(Section):
    """The key that chooses a part of the package where other parts have kinds.

    Attributes:
        kind: which one.
    """

    kind: str


_CHOSEN_BY: dict[str, type[Section]] = {"name": NamedPart, "kind": PartOfKind}


class OwnPart(Section):
    """The key that chooses a part of a user's own.

    Attributes:
        module: where the class is defined, `package.module:name`.
    """

    module: str

    @property
    def name(self) -> str:
        """Return the part's name: its module."""
        return without_tokens(self.module)


# By the classes of the sections, and the names that choose one. A form is made once: two sections are equal only if
# their classes are the same.
_FORMS: dict[tuple[type[Section], type[Section] | None, tuple[str, ...]], type[Section]] = {}


def _named_form(
    section: type[Section], choice: str, names: tuple[str, ...], more: type[Section] | None
) -> type[Section]:
    """Return the form of a section that some names choose: its keys after the key `name` or `kind`."""
    key = (section, more, names)
    if key not in _FORMS:
        title = _form_name(section)
        bases: tuple[type[Section], ...] = (section, _CHOSEN_BY[choice])
        if more is not None:
            title = title.removesuffix("Section") + _form_name(more)
            bases = (more, *bases)
        again = partial(_named_form, section, choice, names, more)
        _FORMS[key] = _joined(title, section, bases, {choice: Literal[names]}, again)
    return _FORMS[key]


def own_form(section: type[Section]) -> type[Section]:
    """Return the form of the section of a part of a user's own: its keys after the key `module`."""
    key = (section, None, ())
    if key not in _FORMS:
        again = partial(own_form, section)
        _FORMS[key] = _joined(f"Own{_form_name(section)}", section, (section, OwnPart), {}, again)
    return _FORMS[key]


def _joined(
    title: str,
    section: type[Section],
    bases: tuple[type[Section], ...],
    choice: dict[str, Any],
    again: Callable[[], type[Section]],
) -> type[Section]:
    """Return a class with the keys of all bases, those of the last base first.

    Pydantic orders fields by the bases from last to first, and takes the configuration of the last: the section's own,
    which may allow more keys, is therefore given again.

    Args:
        again: makes the class. It stands in no module, so another process that is sent an instance makes it itself.
    """

    def reduced(instance: Section) -> tuple[Any, ...]:
        return _empty_instance, (again,), instance.__getstate__()

    def fill(namespace: dict[str, Any]) -> None:
        namespace["__module__"] = section.__module__
        namespace["__doc__"] = section.__doc__
        namespace["__annotations__"] = choice
        namespace["model_config"] = section.model_config
        namespace["__reduce__"] = reduced

    form: type[Section] = types.new_class(title, bases, exec_body=fill)
    return form


def _empty_instance(form: Callable[[], type[Section]]) -> Section:
    """Return an instance of a form that has no values yet, for pickle."""
    made = form()
    return made.__new__(made)


def _form_name(section: type[Section]) -> str:
    """Return what the JSON schema calls a form: MuffliatoSection, for the class Section inside Muffliato."""
    return section.__qualname__.rpartition("<locals>.")[2].replace(".", "")


class PartName:
    """As `Annotated[str, PartName(registry)]`, a field that takes the name of a part.

    Args:
        registry: the registry of the parts.
        own: whether it takes a user's own, too, as `package.module:Name`.
    """

    def __init__(self, registry: Registry[Any], *, own: bool = False) -> None:
        self.registry = registry
        self._own = own

    def _validated(self, name: str) -> str:
        if self._own and ":" in name:
            return name
        if self._own and name not in self.registry:
            raise ArgumentError(
                f"must be one of {', '.join(self.registry)}, or a class of your own, as package.module:Name"
                f"{did_you_mean(name, self.registry)}",
                code=self.registry.key,
            )
        if name not in self.registry:
            raise PydanticKnownError("literal_error", {"expected": expected(self.registry)})
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return pydantic's form of the field."""
        return core_schema.no_info_after_validator_function(self._validated, core_schema.str_schema(strict=True))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the JSON schema of any of the names."""
        names: JsonSchemaValue = {"enum": list(self.registry), "type": "string"}
        if self._own:
            return {"anyOf": [names, {"type": "string"}]}
        return names


def part_field_in(annotation: Any, metadata: Iterable[Any] = ()) -> PartField | None:
    """Return the PartField of an annotation, which may be inside an optional; None if it has no PartField."""
    for extra in (*metadata, *getattr(annotation, "__metadata__", ())):
        if isinstance(extra, PartField):
            return extra

    for inner in get_args(annotation):
        part = part_field_in(inner)
        if part is not None:
            return part
    return None


def expected(names: Iterable[str]) -> str:
    """Return names as pydantic lists what it expects."""
    *others, last = map(repr, names)
    if not others:
        return last
    return f"{', '.join(others)} or {last}"


class PartField:
    """As `Annotated[BaseSection, PartField(...)]`, a field that takes the section of a part, by its form.

    Args:
        registry: the registry of the parts that have a name.
        own: returns the form of a user's part by the section's plain data; it raises ScenarioError.
        usual_own: the form of a user's part without keys, for the JSON schema; None if users have no part here.
        more: a section whose keys stand behind those of a named part.
        default: the name of the part, for a section that gives none; empty if there is no default.
        nameless: the form of a section that gives no name, if that is allowed.
        stray: the code of the error of a key that belongs to other parts.
        unknown: what pydantic calls the error of an unknown name.
    """

    def __init__(
        self,
        registry: Registry[Any],
        *,
        own: Callable[[Mapping[Any, Any]], type[Section]] | None = None,
        usual_own: Callable[[], type[Section]] | None = None,
        more: type[Section] | None = None,
        default: str = "",
        nameless: type[Section] | None = None,
        stray: str = "scenario.extra_forbidden",
        unknown: Literal["literal_error", "union_tag_invalid"] = "literal_error",
    ) -> None:
        self.registry = registry
        self._own = own
        self._usual_own = usual_own
        self._more = more
        self._default = default
        self._nameless = nameless
        self.stray = stray
        self._unknown = unknown

    def forms(self) -> list[type[Section]]:
        """Return every form: one for each section of a named part, then that of a user's own."""
        # Each once: parts that share a Section share its form.
        forms = dict.fromkeys(self.registry.form(name, self._more) for name in self.registry)
        found: list[type[Section]] = [*forms]
        if self._usual_own is not None:
            found.append(self._usual_own())
        if self._nameless is not None:
            found.append(self._nameless)
        return found

    def form_of(self, data: Any) -> type[Section] | None:
        """Return the form that plain data choose; None if they choose none."""
        if not isinstance(data, Mapping):
            return None
        if self._own is not None and "module" in data:
            return self._own(data)
        choice = self.registry.choice
        if choice not in data and self._nameless is not None:
            return self._nameless

        name = data.get(choice, self._default)
        if not isinstance(name, str) or name not in self.registry:
            return None
        return self.registry.form(name, self._more)

    def _validated(self, value: Any) -> Section:
        if isinstance(value, Section):
            return value
        if not isinstance(value, dict):
            raise PydanticKnownError("model_attributes_type")
        if self._own is not None and "module" in value:
            return self._validated_own(value, self._own)
        choice = self.registry.choice
        if choice not in value and self._default:
            value = {choice: self._default, **value}
        if choice not in value and self._nameless is None:
            raise self._without_name(value)

        form = self.form_of(value)
        if form is None:
            raise self._unknown_name(value[choice])
        return form.model_validate(value)

    def _without_name(self, value: object) -> Exception:
        choice = self.registry.choice
        if self._unknown == "literal_error":
            return ValidationError.from_exception_data(
                self.registry.key, [{"type": "missing", "loc": (choice,), "input": value}]
            )
        return PydanticKnownError("union_tag_not_found", {"discriminator": repr(choice)})

    def _unknown_name(self, name: object) -> Exception:
        choice = self.registry.choice
        if self._unknown == "literal_error":
            context = {"expected": expected(self.registry)}
            return ValidationError.from_exception_data(
                self.registry.key, [{"type": "literal_error", "loc": (choice,), "input": name, "ctx": context}]
            )
        known = ", ".join(repr(part) for part in self.registry)
        return PydanticKnownError(
            "union_tag_invalid", {"discriminator": repr(choice), "tag": str(name), "expected_tags": known}
        )

    def _validated_own(self, value: dict[Any, Any], own: Callable[[Mapping[Any, Any]], type[Section]]) -> Section:
        key = f"{self.registry.key.rpartition('.')[0]}.module"
        try:
            return own(value).model_validate(value)
        except ValueError:  # a ValidationError of pydantic is one
            raise
        except ScenarioError as error:
            raise ArgumentError(str(error), code=error.code) from error
        except RAISED_BY_USERS as error:  # a user's own validator may raise anything
            raise ArgumentError(
                f"{key}={value['module']!r}: its Section raised {one_line(error)}", code="code.fails"
            ) from error

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return pydantic's form of the field: the section's own class validates and serializes it."""
        return core_schema.no_info_plain_validator_function(self._validated)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the JSON schema of all forms, discriminated by name."""
        return handler(core_schema.union_schema([form.__pydantic_core_schema__ for form in self.forms()]))
