"""A user's script, as mypy sees it: `make check` holds the types, and that each wrong line is an error."""

from typing import Any, assert_type

import torch

import flower_privdec as fp


def script() -> None:
    """Never run."""
    result = fp.run(fp.load_scenario("a.yaml", {"rounds": 3}), on_evaluation=lambda metrics: None)
    assert_type(result, fp.RunResult)
    assert_type(result.metrics, list[dict[str, Any]])
    assert_type(result.model(), torch.nn.Module)
    fp.run(3)  # type: ignore[arg-type]
    fp.rnu  # type: ignore[attr-defined]  # noqa: B018
