"""How peers draw their examples, as accounting sees it; and what of that all peers know about each other."""

from __future__ import annotations

import numpy as np

from flower_privdec.common.errors import ScenarioError
from flower_privdec.core import Reply
from flower_privdec.data import Sampler
from flower_privdec.data.datasets import sizes_of_parts
from flower_privdec.experiment.agreement import Agreement
from flower_privdec.privacy.mechanism.declared import Declaration, Drawing

MOST_DECLARED = 10_000  # steps whose declarations are compared
KIND = "privacy.noise.kind=cancelling"


def drawings_of(agreement: Agreement, peers: np.ndarray, sampler: Sampler) -> list[Drawing]:
    """Return what the releases of some peers depend on: how each draws its examples and how many neighbours it answers.

    Privacy: a peer that takes all its examples in every step draws none, whatever its sampling is called.
    """
    answered: list[tuple[int, ...]] = [()] * len(peers)  # of each peer, its neighbours in each round
    sends_replies = any(isinstance(item, Reply) for item in agreement.algorithm.program)
    if agreement.mixing is not None and sends_replies:
        heard = agreement.mixing.heard(agreement.scenario.rounds)[:, peers]  # [rounds, m]
        answered = [tuple(counts) for counts in heard.T.tolist()]

    drawings = []
    facts = zip(
        sampler.sampling_rate.tolist(),
        sampler.partition_sizes.tolist(),
        sampler.normalizer.tolist(),
        answered,
        strict=True,
    )
    for rate, size, batch, counts in facts:
        kind = sampler.kind if rate < 1 else "full"
        drawings.append(Drawing(kind, rate, size, batch, counts, sampler.groups))
    return drawings


def sampler_of_all(agreement: Agreement, root: str | None, whole: bool, groups: int, key: str = KIND) -> Sampler:
    """Return how all peers draw, as far as all of them know: plans of pairs and weights by noise follow from it.

    Args:
        root, whole: see `OwnParts.of`.
        groups: into how many groups the examples of each are divided.
        key: the setting that needs it, in errors.

    Raises:
        ScenarioError: each peer has a file of its own, whose size the others do not know; or all that they know is a
            least number of examples, and batches are drawn in a way for which nothing is proved then.

    Privacy: with `data.at_least` peers are planned for, and charged, as if each had exactly that many examples.
    """
    scenario = agreement.scenario
    data = scenario.data
    everyone = np.arange(scenario.n_peers)

    if data.at_least is not None:
        _check_least_number_is_enough(agreement, data.at_least, key)
        if key == KIND:
            _check_sizes_change_no_release(agreement, data.at_least)
        sizes = np.full(scenario.n_peers, data.at_least)
    elif data.each_its_own or whole:
        raise ScenarioError(
            f"{key} needs the number of every peer's examples, which is private if each has data of its own: give "
            "data.at_least, a number that each of them has, or partition one dataset (data.partition)",
            code="noise.cancelling-sizes",
        )
    else:
        targets = agreement.loss.targets
        sizes = sizes_of_parts(data, scenario.seed_of("data"), scenario.n_peers, root, targets)

    # Only rates and sizes are read of this sampler; nothing is drawn from these keys.
    keys = dict.fromkeys(everyone.tolist(), scenario.seed_of("run"))
    return Sampler(data.batch, sizes, keys, everyone, groups)


def _check_least_number_is_enough(agreement: Agreement, least: int, key: str) -> None:
    """Refuse what cannot be planned from a least number of examples at every peer."""
    batch = agreement.scenario.data.batch
    algorithm = agreement.algorithm

    if batch.sampling != "poisson" or batch.size is None or batch.small_peers == "full":
        raise ScenarioError(
            f"{key} with data.at_least={least} needs batches of one expected size at all peers: set "
            "data.batch.sampling=poisson and data.batch.size, and leave data.batch.small_peers out",
            code="noise.cancelling-batches",
        )

    # Any sizes that differ show whether the algorithm weighs peers by them.
    different_sizes = np.arange(agreement.scenario.n_peers) + 1
    if np.ptp(algorithm.conserved_weights(different_sizes)) > 0:
        raise ScenarioError(
            f"{key} with data.at_least={least} needs peers of equal weight, and algorithm.name={algorithm.name} "
            "weighs them by their examples, whose number is private: set its weighting to uniform",
            code="noise.cancelling-weights",
        )


def _check_sizes_change_no_release(agreement: Agreement, least: int) -> None:
    """Refuse an algorithm whose releases change with the number of a peer's examples.

    Every peer is charged as if it had the least number. That bounds the spending of a larger peer because it draws each
    example more rarely and does nothing else differently, see `mechanism.cancelling`. A table of past gradients, for
    one, moves by more at a larger peer.
    """
    algorithm = agreement.algorithm
    batch = agreement.scenario.data.batch.size
    assert batch is not None  # see above
    steps = min(agreement.scenario.rounds * algorithm.steps_per_round, MOST_DECLARED)

    def releases(size: int) -> list[Declaration]:
        drawing = Drawing("poisson", min(1.0, batch / size), size, batch)
        return [algorithm.released(step, drawing) for step in range(steps)]

    planned = releases(least)
    if any(releases(size) != planned for size in (least + 1, 2 * least, 1000 * least)):
        raise ScenarioError(
            f"{KIND} with data.at_least={least}: what algorithm.name={algorithm.name} releases depends on the number "
            "of a peer's examples, which is private, so that a peer with more would spend more than is planned: take "
            "privsgp, or leave privacy.noise out",
            code="noise.cancelling-sizes",
        )
