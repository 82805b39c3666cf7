"""A whole file as a section that remembers where its values were given."""

from __future__ import annotations

from contextlib import AbstractContextManager

from pydantic import PrivateAttr

from flower_privdec.scenario.fields import Section
from flower_privdec.scenario.findings import Places, located


class LocatedFile(Section):
    """All that a file says, and where."""

    _places: Places = PrivateAttr(default_factory=Places)

    def given_at(self, places: Places) -> None:
        """Remember where the values were given."""
        self._places = places

    def located(self) -> AbstractContextManager[None]:
        """Return a context in which an error that begins with a key of the file gets the place it was given at."""
        return located(self._places, type(self))
