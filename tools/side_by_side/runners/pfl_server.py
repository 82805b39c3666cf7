"""The task in pfl-research: federated averaging with a server, and its Gaussian mechanism, central or local.

One process, as in its tutorials; the averaging counts each user by one if there is privacy, so that one user's
update moves the sum by no more than the clip norm.
"""

from __future__ import annotations

import time

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_accountant import PLDPrivacyAccountant
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from shared import Outcome, accuracy, given, images, model, shares


class Network(torch.nn.Module):
    """The model with the two functions that pfl requires."""

    def __init__(self, layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
        self.eval() if eval else self.train()
        return torch.nn.functional.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> dict:
        return {"loss": Weighted(self.loss(x, y, eval).item() * len(x), len(x))}


class Rounds(TrainingProcessCallback):
    """Records when training begins and when each round has ended."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.ended = 0.0

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.outcome.start()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int):
        self.ended = time.time()
        return False, Metrics()


def postprocessors(task: dict) -> tuple[list, dict]:
    """Return the privacy mechanism, if any, and its ε and noise."""
    if task["privacy"] == "none":
        return [], {}
    accountant = PLDPrivacyAccountant(
        num_compositions=task["rounds"],
        sampling_probability=1.0,
        mechanism="gaussian",
        epsilon=task["epsilon"],
        delta=task["delta"],
    )
    mechanism = GaussianMechanism.from_privacy_accountant(accountant, clipping_bound=task["clip_norm"])
    facts = {"claimed_epsilon": accountant.epsilon, "noise_multiplier": accountant.cohort_noise_parameter}
    central = task["privacy"] == "central"
    return [CentrallyAppliedPrivacyMechanism(mechanism) if central else mechanism], facts


def main() -> None:
    task = given()
    outcome = Outcome(task)
    x, y = images(task["data"], train=True)
    parts = shares(len(x), task["n_peers"])

    def user(index: int) -> Dataset:
        chosen = torch.from_numpy(parts[index])
        return Dataset(raw_data=[x[chosen], y[chosen]], user_id=str(index))

    users = FederatedDataset(user, MinimizeReuseUserSampler(list(range(len(parts)))))
    network = Network(model(task["hidden"]))
    trained = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    privacy, facts = postprocessors(task)
    rounds = Rounds(outcome)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=task["rounds"],
            evaluation_frequency=task["rounds"] + 1,  # in the first round it cannot be left out
            train_cohort_size=task["n_peers"],
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=users, val_data=users, postprocessors=privacy),
        model=trained,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=task["learning_rate"], local_batch_size=task["batch"]
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=10_000),
        callbacks=[rounds],
    )
    outcome.write(rounds.ended, accuracy(network, *images(task["data"], train=False)), **facts)


if __name__ == "__main__":
    main()
