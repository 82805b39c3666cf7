"""Names of Flower on the page for those who come from it, against the installed Flower."""

from __future__ import annotations

import inspect

import pytest
from paths import ROOT

PAGE = ROOT / "docs" / "how-to" / "coming-from.md"


def test_flowers_names_on_the_page_are_its_own() -> None:
    pytest.importorskip("flwr", reason="the extra flower is not installed")
    from flwr.cli.constant import SuperLinkSimulationOptionsTomlKey
    from flwr.clientapp import mod
    from flwr.serverapp.strategy import (
        DifferentialPrivacyClientSideAdaptiveClipping,
        DifferentialPrivacyClientSideFixedClipping,
        DifferentialPrivacyServerSideAdaptiveClipping,
        FedAvg,
    )

    text = PAGE.read_text(encoding="utf-8")
    wrapper = DifferentialPrivacyClientSideFixedClipping
    arguments = [name for name, one in inspect.signature(wrapper).parameters.items() if one.default is one.empty]
    assert f"`{wrapper.__name__}({', '.join(arguments)})`" in text
    assert f"mods=[{mod.fixedclipping_mod.__name__}]" in text
    assert f"`options.{SuperLinkSimulationOptionsTomlKey.NUM_SUPERNODES}`" in text
    assert "num_rounds" in inspect.signature(FedAvg.start).parameters
    assert "num_rounds=" in text

    # "Only the fixed wrappers take an accountant."
    assert "accountant" in inspect.signature(wrapper).parameters
    for adaptive in (DifferentialPrivacyClientSideAdaptiveClipping, DifferentialPrivacyServerSideAdaptiveClipping):
        assert "accountant" not in inspect.signature(adaptive).parameters
