"""Every key of a study, read from its schema, as `scenario_reference` does for a scenario's."""

from __future__ import annotations

from pydantic import BaseModel

from flower_privdec.common.catalogue import METRIC_KINDS
from flower_privdec.studies.spec import (
    ALWAYS,
    Above,
    Axis,
    Best,
    CellSettings,
    Figure,
    Ordered,
    Part,
    PartSize,
    Pivot,
    Point,
    Size,
    Slope,
    Speedup,
    Study,
    readings_of,
)
from tools.docs.scenario_reference import table

SECTIONS: dict[str, tuple[type[BaseModel], ...]] = {
    "": (Study,),
    "sizes.NAME": (Size,),
    "parts": (Part,),
    "parts.axes.NAME": (Axis,),
    "parts.axes.NAME.points": (Point,),
    "parts.cases": (CellSettings,),
    "parts.sizes.NAME": (PartSize,),
    "parts.figures": (Figure,),
    "parts.pivot": (Pivot,),
    "parts.checks": (Ordered, Best, Above, Speedup, Slope),
}


def study_reference() -> str:
    """Return the reference as Markdown."""
    lines = []
    for place, sections in SECTIONS.items():
        lines += [f"## {place}", ""] if place else []
        for section in sections:
            lines += table(section, f"{place}." if place else "")
    usual = readings_of("accuracy", METRIC_KINDS["accuracy"]) | ALWAYS
    metrics = [f"| `{name}` | {metric.title} |" for name, metric in usual.items()]
    return "\n".join([*lines, "## Metrics", "", "| name | what it is |", "|---|---|", *metrics, ""])
