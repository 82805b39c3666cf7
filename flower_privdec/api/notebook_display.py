"""How results show themselves in a notebook and at a prompt."""

from __future__ import annotations

from flower_privdec.reporting.plots import html_of


class ShowsItself:
    """A result that a prompt shows as it is printed, not as a list of its fields, and a notebook as HTML.

    A dataclass that extends it must say `repr=False`.
    """

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html_of(str(self))
