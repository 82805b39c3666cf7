"""Whether FedDeper's penalty feeds back on itself faster than the personalized models are renewed."""

from __future__ import annotations

import math

from flower_privdec.common.formatting import number, setting

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
        server: whether the active peers alone are averaged.
    """
    kappa = 1 - (1 - rho) ** steps
    moved = kappa if server else share * kappa
    return 1 - share * mixing_rate * (1 + kappa) + moved


def caution(rho: float, steps: int, mixing_rate: float, active: int, n_peers: int, rounds: int, *, server: bool) -> str:
    """Say that the penalty is too strong for the share of active peers, and the largest ρ that is not; "" if it is not.

    Args:
        rho, steps, mixing_rate, server: as in `growth`.
        active: how many of n_peers are active in a round.
        rounds: of the run.
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
