"""FedDeper: a depersonalized model that is sent and a personalized one that stays home."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from flower_privdec.algorithms.federated import FedAvg, LocalStepsSection
from flower_privdec.common.deferred import is_small, torch
from flower_privdec.common.errors import ArgumentError
from flower_privdec.common.formatting import number, setting
from flower_privdec.core.cohort import Cohort, PrivateStep, StepRequest
from flower_privdec.core.exchange import State
from flower_privdec.data import Batch
from flower_privdec.privacy.mechanism.declared import Declaration, Drawing, ReleasedSum
from flower_privdec.rows.tensors import compiled, empty_rows, padded

if TYPE_CHECKING:
    from torch import Tensor


class FedDeper(FedAvg):
    """Train two models a peer: y, pulled away from the personal v towards the common x, and v itself.

        y ← x;  τ times:  y ← y - η (g_i(y) + (ρ/η) (v + y - 2 x)),  v ← v - η g_i(v)    (v fixed in y's step)
        v ← (1 - λ) v + λ y;   x ← x + mean over active peers of (y - x)

    Both gradients of a step are one batched computation on the same examples. Inactive peers keep v. Over a
    graph x is the peer's mixed model z = x / w, and v stays home as well.

    Privacy: as `released` declares. For ρ > 0 v is a function of what was noised, and the ledger's ε covers it too; for
    ρ = 0 it is not, and stays on its peer.

    Deviations from the paper: none without privacy.

    Source: FedDeper, Algorithm 1.
    """

    name = "feddeper"
    line = "depersonalized and personalized models (FedDeper, Alg. 1), with a server or over a graph"

    class Section(LocalStepsSection):
        """FedDeper: a depersonalized and a personalized model at every peer.

        Attributes:
            local_steps: τ, how many in a round; feddeper* takes half of them.
            rho: ρ, the strength of the penalty that pulls the model that is sent away from the personalized one.
            mixing_rate: λ, the share of the model that is sent in the personalized one at the end of a round; at least
                1/2, unless any_mixing_rate is true.
            any_mixing_rate: whether to allow a mixing rate below 1/2, of which the paper proves nothing.
        """

        no_optimizer = "pulls its two models towards each other by plain steps of both"

        rho: Annotated[float, Field(ge=0, lt=1)] = 0.003
        mixing_rate: Annotated[float, Field(ge=0, le=1)] = 0.5
        any_mixing_rate: bool = False

        def _check(self) -> None:
            super()._check()
            if self.mixing_rate < 0.5 and not self.any_mixing_rate:
                raise ArgumentError(
                    f"mixing_rate={self.mixing_rate} must be in [1/2, 1], for which FedDeper is analysed; "
                    "set any_mixing_rate: true to try another",
                    code="feddeper.mixing-rate",
                )

        def unused_keys(self) -> Iterator[tuple[str, str, str]]:
            """Yield the permission of a rate that needs none."""
            yield from super().unused_keys()
            if self.any_mixing_rate and self.mixing_rate >= 0.5:
                yield "any_mixing_rate", f"algorithm.mixing_rate={self.mixing_rate:g}", "lower that below 1/2"

    variants = (("algorithm.rho=0",),)
    slots = 2
    steadied_by = ("learning_rate", "rho", "local_steps")

    def __init__(self, section: Section) -> None:
        super().__init__(section)
        self.rho = section.rho
        self.mixing_rate = section.mixing_rate

    def released(self, step: int, drawing: Drawing) -> Declaration:
        """Declare the sums of both models' gradients over one batch, or at ρ = 0 that of y alone.

        v never leaves the peer, but the penalty v + y - 2 x carries it into y, which does. So for ρ > 0 both sums are
        noised, and everything sent is a function of them and of what came in; one example moves the pair by at most
        sqrt(C² + C²). For ρ = 0 nothing computed from v's gradients is ever sent (y starts at x, and v only takes
        from y): they are neither clipped nor noised.
        """
        return ReleasedSum("gradient"), ReleasedSum("personal", to="all" if self.rho else "self")

    def initial(self, cohort: Cohort) -> dict[str, Tensor]:
        """Return x, w and the personalized models v = x^0."""
        rows = super().initial(cohort)
        return rows | {"personal": rows["x"].clone()}

    def personal(self, rows: dict[str, Tensor]) -> Tensor | None:
        """Return each peer's personalized model, [m, d], if the rows that stay at home are at hand."""
        return rows.get("personal")

    def cautions(self, active: int, n_peers: int, rounds: int, *, server: bool) -> list[str]:
        """Say where the penalty feeds back on itself faster than the personalized models are renewed (`caution`)."""
        steps = self.steps_per_round
        warning = caution(self.rho, steps, self.mixing_rate, active, n_peers, rounds, server=server)
        return [warning] if warning else []

    def walk(self, cohort: Cohort, state: State, rows: np.ndarray, start: Tensor) -> Tensor:
        """Walk y and v together; v ends mixed with y."""
        personal = state.rows["personal"]

        # One tensor holds both, so that one pass over a batch takes the gradients at y and at v.
        pair = empty_rows(start, 2, *start.shape)
        pair[0].copy_(start)
        for place, row in enumerate(rows.tolist()):
            pair[1, place].copy_(personal[row])

        # The pull is by v + y - 2 x as they are before the step, like the gradients. So it goes elsewhere, and the
        # gradients are added to it there: one pass over the rows for both. At ρ = 0 the step is in place.
        ahead = pair
        if self.rho:
            ahead = empty_rows(start, *pair.shape)
        for local_step in range(self.steps_per_round):
            if self.rho:
                pull_apart(pair, start, self.rho, ahead)
            cohort.descend_rows_(
                StepRequest(
                    sums={"gradient": ahead[0], "personal": ahead[1]},
                    params=pair[0],
                    round_index=state.round_index,
                    local_step=local_step,
                    rows=rows,
                    estimate=partial(self.both, pair, ahead),
                )
            )
            pair, ahead = ahead, pair

        y: Tensor
        y, v = pair
        for place, row in enumerate(rows.tolist()):
            torch.lerp(v[place], y[place], self.mixing_rate, out=personal[row])
        return y

    def both(self, pair: Tensor, ahead: Tensor, cohort: Cohort, step: PrivateStep) -> None:
        """Add -η times the gradients of y and v, the halves of `pair`, by one product if nothing tells them apart.

        Args:
            pair: [2, r, d].
            ahead: the sums of the step, [2, r, d]; may be `pair` itself.
        """
        batch = step.batch
        clip = step.clip_norm
        if cohort.apart or (clip is not None and not self.rho):
            bounds = (clip, clip if self.rho else None)
            for out, point, bound in zip(step.sums.values(), pair, bounds, strict=True):
                cohort.kernel.add_clipped_(out, point, batch, bound, step.scale)
            return

        sums = ahead.view(-1, ahead.shape[-1])
        points = pair.view(-1, pair.shape[-1])
        twice = Batch(*(torch.cat([part, part]) for part in (batch.x, batch.y, batch.weight, batch.index)))
        bound = None if clip is None else torch.cat([clip, clip])
        cohort.kernel.add_clipped_(sums, points, twice, bound, torch.cat([step.scale, step.scale]))


def pull_apart(pair: Tensor, start: Tensor, rho: float, ahead: Tensor) -> None:
    """Write y - ρ (v + y - 2 x) and v into `ahead`, [2, r, d]: in one pass over the rows, compiled, on a CPU.

    Args:
        pair: y and v, [2, r, d].
        start: x, [r, d].
    """
    y, v = pair
    if pair.is_cpu and pair.dtype in (torch.float32, torch.float64) and not is_small():
        whole = [padded(rows) for rows in (y, v, start, ahead[0], ahead[1])]
        arrays = [rows.numpy() for rows in whole if rows is not None]
        if len(arrays) == len(whole):
            _compiled_pull()(*arrays, start.shape[1], arrays[0].dtype.type(rho))
            return

    torch.add(v, y, out=ahead[0]).sub_(start, alpha=2)
    torch.add(y, ahead[0], alpha=-rho, out=ahead[0])
    ahead[1].copy_(v)


@cache
def _compiled_pull() -> Any:
    """Compile the loop when it is first needed: numba takes long to import."""
    return compiled(_pull)


def _pull(y, v, x, ahead_y, ahead_v, width, rho):  # type: ignore[no-untyped-def]
    for i in range(len(x)):
        for c in range(width):
            ahead_y[i, c] = y[i, c] - rho * (v[i, c] + y[i, c] - (x[i, c] + x[i, c]))
            ahead_v[i, c] = v[i, c]


class FedDeperStar(FedDeper):
    """FedDeper with half the local steps, so that its two models cost what FedAvg's one does.

    Source: FedDeper, section on experiments (FedDeper*).
    """

    name = "feddeper*"
    line = "FedDeper with half the local steps"

    class Section(FedDeper.Section):
        """FedDeper with half the local steps."""

        @property
        def steps_per_round(self) -> int:
            """Half of local_steps, and one at least."""
            return max(1, self.local_steps // 2)

    released = FedDeper.released


LARGEST_GROWTH = 100.0  # over the whole run; gradients damp what is below it


def growth(rho: float, steps: int, mixing_rate: float, share: float, *, server: bool) -> float:
    """Return the factor by which the peers' mean deviation v - x grows in a round when no gradient damps it.

    Let b_i = v_i - x, p the share of active peers, and leave the gradients out. An active peer's y runs off from x
    against b_i, y ← y - ρ (v + y - 2 x), and after τ steps

        y - x = -κ b_i   with κ = 1 - (1 - ρ)^τ,   then   b_i ← (1 - λ (1 + κ)) b_i.

    The server moves x by the active peers' mean, -κ b̄, which every b_i, of inactive peers too, sees as +κ b̄:

        b̄ ← (1 - p λ (1 + κ) + κ) b̄.

    So the run is stable only for κ < p λ / (1 - p λ): p = 0.05 and λ = 1/2 ask for κ < 0.026, and ρ = 0.03,
    τ = 10 have κ = 0.26, while ρ = 0.003 has 0.030, a growth of 0.4 % a round. Over a graph the mean of all
    peers' models moves by -p κ b̄ alone, b̄ ← (1 - p (λ (1 + κ) - κ)) b̄, which falls for every λ >= 1/2.

    Args:
        rho: ρ.
        steps: τ.
        mixing_rate: λ.
        share: p.
        server: whether only the active peers are averaged.
    """
    kappa = 1 - (1 - rho) ** steps
    moved = kappa if server else share * kappa
    return 1 - share * mixing_rate * (1 + kappa) + moved


def caution(rho: float, steps: int, mixing_rate: float, active: int, n_peers: int, rounds: int, *, server: bool) -> str:
    """Say that the penalty is too strong for the share of active peers, and the largest ρ that is not; "" if it is not.

    Args:
        rho, steps, mixing_rate, server: as in `growth`.
        active: how many of n_peers are active in a round.
        rounds: the number of rounds of the run.
    """
    share = active / n_peers
    factor = growth(rho, steps, mixing_rate, share, server=server)
    if factor <= 1 or rounds * math.log(factor) <= math.log(LARGEST_GROWTH):
        return ""
    return (
        f"the penalty of rho={setting(rho)} over {steps} local steps with {active} of {n_peers} "
        f"peers active makes the personalized models' distance to x grow by up to {number(factor)} a round: the run "
        f"may diverge; {_remedy(steps, share * mixing_rate)}"
    )


def _remedy(steps: int, renewed: float) -> str:
    """Name the ρ at which the growth is 1, κ = p λ / (1 - p λ)."""
    kappa = renewed / (1 - renewed) if renewed < 0.5 else 1.0
    stable = 1 - (1 - kappa) ** (1 / steps)
    return f"take rho <= {float(f'{stable:.1g}'):g}, fewer local steps, or more active peers"
