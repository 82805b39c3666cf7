"""Errors by their code: messages may be reworded, codes stay."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from flower_privdec.common.errors import CodedError


@contextmanager
def raises(error: type[CodedError], code: str, names: str = "") -> Iterator[pytest.ExceptionInfo[CodedError]]:
    """Expect an error of a type and code whose message names what matters, such as the value that broke the rule.

    Args:
        error: the type, or one above it.
        code: `CodedError.code`.
        names: a regular expression that the message contains: the value, the file or the key, never the wording.
    """
    with pytest.raises(error) as caught:
        yield caught
    assert caught.value.code == code, f"{caught.value.code!r} is not {code!r}: {caught.value}"
    assert re.search(names, str(caught.value)), f"{names!r} is not in: {caught.value}"
