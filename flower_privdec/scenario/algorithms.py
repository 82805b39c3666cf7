"""The `algorithm` section: one form for each family of algorithms, told apart by the name."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from flower_privdec.scenario.fields import Count, PerPeer, Section

Growth = Annotated[float, Field(ge=1, allow_inf_nan=False)]


class GradientSection(Section):
    """What all algorithms that descend along gradients share."""

    learning_rate: PerPeer
    learning_rate_decay: Annotated[float, Field(ge=0, le=1)] = 0.0  # final share of the rounds: linear to 0


class SGDSection(GradientSection):
    """Stochastic gradient steps."""

    name: Literal["sgp", "privsgp", "d-psgd", "dp2-sgd", "dp-sgd", "local"]


class VRSection(GradientSection):
    """PrivSGP-VR: which memory of gradients reduces the variance."""

    name: Literal["privsgp-vr"]
    table: Literal["factored", "blocks", "snapshot", "dense"] = "factored"
    snapshot_every: Count = 100


class DynD2PSection(GradientSection):
    """Dyn-D2P: a decaying clip norm and a growing per-step budget."""

    name: Literal["dyn-d2p"]
    initial_clip: PerPeer | None = None  # C_0; by default privacy.clip_norm
    rho_c: Growth = 2.0
    rho_mu: Growth = 2.0


class DynCSection(GradientSection):
    """Dyn[C]-D2P: a decaying clip norm, a constant per-step budget."""

    name: Literal["dyn-c-d2p"]
    initial_clip: PerPeer | None = None  # C_0; by default privacy.clip_norm
    rho_c: Growth = 2.0


class DynMuSection(GradientSection):
    """Dyn[μ]-D2P: a constant clip norm, a growing per-step budget."""

    name: Literal["dyn-mu-d2p"]
    clip_norm: PerPeer | None = None  # C; by default privacy.clip_norm
    rho_mu: Growth = 2.0


class ConstSection(GradientSection):
    """Const-D2P: a constant clip norm and per-step budget."""

    name: Literal["const-d2p"]
    clip_norm: PerPeer | None = None  # C; by default privacy.clip_norm


class AsynchronousSection(GradientSection):
    """A(DP)²SGD: one peer wakes at a time and uses a gradient of a stale model."""

    name: Literal["adp2-sgd"]
    staleness: Count | None = None  # most events since the model was read; by default 4 n_peers


DynSection = DynD2PSection | DynCSection | DynMuSection | ConstSection
AlgorithmSection = Annotated[
    SGDSection | VRSection | DynD2PSection | DynCSection | DynMuSection | ConstSection | AsynchronousSection,
    Field(discriminator="name"),
]


def dynamic(section: GradientSection) -> tuple[PerPeer | None, float, float] | None:
    """Return (clip norm or None, ρ_c, ρ_μ) of the Dyn-D2P family, or None for another."""
    if not isinstance(section, DynSection):
        return None
    clip = getattr(section, "initial_clip", None) or getattr(section, "clip_norm", None)
    return clip, getattr(section, "rho_c", 1.0), getattr(section, "rho_mu", 1.0)
