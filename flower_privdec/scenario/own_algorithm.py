"""The section of an algorithm of a user's own, and what it shares with those that have a name."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from flower_privdec.common.formatting import one_line
from flower_privdec.common.user_code import find_given, is_given, load_own, without_tokens
from flower_privdec.errors import RAISED_BY_USERS, ScenarioError
from flower_privdec.scenario.fields import PerPeer, Section


class DescentSection(Section):
    """What all algorithms that descend along gradients share.

    Attributes:
        learning_rate: γ, of all peers or of each.
        learning_rate_decay: the share of the rounds, at the end, over which the learning rate falls linearly to 0.
    """

    learning_rate: PerPeer
    learning_rate_decay: Annotated[float, Field(ge=0, le=1)] = 0.0


class OwnAlgorithmSection(DescentSection):
    """The section of an algorithm of a user's own, whose class names a subclass with its own keys as `Section`.

    Attributes:
        module: where the class lies, `package.module:name`.
    """

    module: str

    @property
    def name(self) -> str:
        """Return what the algorithm is called: where it lies."""
        return without_tokens(self.module)


class AbsentAlgorithmSection(OwnAlgorithmSection):
    """The section of an algorithm that was given as a Python object in another process: its keys are not known."""

    model_config = ConfigDict(extra="allow")


def own_section(module: object) -> type[OwnAlgorithmSection]:
    """Return the form of the section of a user's algorithm.

    Raises:
        ScenarioError: the class cannot be had, or is no algorithm.
    """
    if not isinstance(module, str):
        raise ScenarioError(f"algorithm.module={module!r} must be 'package.module:name'")
    if is_given(module) and find_given(module) is None:
        return AbsentAlgorithmSection
    own: Any = load_own(
        module,
        "algorithm.module",
        accepts=lambda part: isinstance(part, type) and hasattr(part, "Section"),
        must_be="a subclass of flower_privdec.algorithms.Algorithm",
    )
    section: Any = own.Section
    if not (isinstance(section, type) and issubclass(section, OwnAlgorithmSection)):
        raise ScenarioError(
            f"algorithm.module={module!r}: Section must be a subclass of flower_privdec.scenario.OwnAlgorithmSection"
        )
    return section


def by_its_own_form(value: Any, _: object) -> OwnAlgorithmSection:
    """Read a section by the form that the user's own class gives it, in place of the plain one."""
    if isinstance(value, OwnAlgorithmSection):
        return value
    try:
        return own_section(value["module"]).model_validate(value)
    except ValueError:  # pydantic's findings are, too
        raise
    except ScenarioError as error:
        raise ValueError(str(error)) from error
    except RAISED_BY_USERS as error:  # a user's own validator may raise anything
        raise ValueError(f"algorithm.module={value['module']!r}: its Section raised {one_line(error)}") from error
