"""What varies between the cells of a study."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field, model_validator

from flower_privdec.common.formatting import setting
from flower_privdec.scenario.fields import Section

Lines = Annotated[list[str], Field(default_factory=list)]


class Point(Section):
    """One place on an axis.

    Attributes:
        label: what to call it.
        settings: `key=value` lines that make it.
        value: where it stands on a numeric axis; left out, it is a category.
    """

    label: str
    settings: Lines
    value: float | None = None


class Axis(Section):
    """What varies between cells: either one key's values, or named points with settings of their own.

    Attributes:
        title: what tables and pictures call it; left out, its name.
        key: of the scenario, as `privacy.epsilon`.
        values: of the key, each a point.
        points: in place of key and values.
    """

    title: str | None = None
    key: str | None = None
    values: list[Any] | None = None
    points: list[Point] | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Axis:
        if (self.points is None) == (self.values is None) or (self.values is None) != (self.key is None):
            raise ValueError("give an axis either key and values, or points (label and settings): one of the two")
        labels = self.labels()
        if not labels or len(set(labels)) < len(labels):
            raise ValueError(f"an axis needs points whose labels differ, not {labels}")
        return self

    def all_points(self) -> list[Point]:
        """Return the points in order; numbers along a key are labelled and placed by themselves."""
        if self.points is not None:
            return self.points
        return [_point(str(self.key), value) for value in self.values or []]

    def labels(self) -> list[str]:
        """Return the points' labels in order."""
        return [point.label for point in self.all_points()]


def _point(key: str, value: Any) -> Point:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return Point(
        label=setting(value) if number else str(value),
        settings=[f"{key}={json.dumps(value)}"],
        value=float(value) if number else None,
    )
