"""What a plan says of noise that is correlated over steps, and of drawing from more examples in its place."""

from __future__ import annotations

from typing import Any

from flower_privdec.experiment import Experiment
from flower_privdec.experiment.correlation_plan import choices_for, noise_in_models
from flower_privdec.privacy.mechanism.correlation import INDEPENDENT_STEPS, best_choice


def band_facts(experiment: Experiment) -> dict[str, Any] | None:
    """Return what correlation over steps does; None if noise is not correlated.

    Returns:
        bands, coefficients, norm: of the correlation;
        best_bands: the number that `bands: auto` takes; None without a budget;
        in_models: the noise in the models over that without correlation at the same ε; missing without a budget;
        choices: for some numbers of bands the noise multiplier, and that noise on average and after the last step.
    """
    private = experiment.scenario.private
    protection = experiment.own.protection
    if private is None or protection is None or private.correlated_noise is None:
        return None

    correlation = protection.correlation
    assert correlation is not None
    facts: dict[str, Any] = {
        "bands": correlation.bands,
        "coefficients": list(correlation.coefficients),
        "norm": correlation.norm,
        "best_bands": None,
        "choices": [],
    }
    if private.epsilon is None:
        return facts

    # All are over what noise of the same ε leaves that is not correlated, with batches drawn from all examples.
    sizes = experiment.own.examples.sizes
    found = choices_for(experiment, sizes)
    independent = found[0]
    facts["best_bands"] = best_choice(found).correlation.bands
    for choice in found:
        facts["choices"].append(
            {
                "bands": choice.correlation.bands,
                "noise_multiplier": choice.noise_multiplier,
                "in_models": choice.in_models / independent.in_models,
                "at_end": choice.at_end / independent.at_end,
            }
        )

    needed = protection.noise_multipliers[0]
    if protection.pairs is not None:
        needed = needed / protection.pairs.own[0]
    taken = noise_in_models(experiment, correlation, float(needed.mean()))
    facts["in_models"] = taken / independent.in_models
    assert independent.correlation == INDEPENDENT_STEPS
    return facts
