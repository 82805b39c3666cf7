"""A strategy whose peers talk to each other directly: the ServerApp introduces them, and waits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.serverapp.strategy import Result

from flower_privdec.common.arguments import check_numbers
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.flower.mods.peer_messages import INITIAL, MESH
from flower_privdec.flower.strategies.push_sum import PushSum
from flower_privdec.scenario import to_yaml
from flower_privdec.scenario.sections import AppScenario

log = logging.getLogger("flwr.privdec")


class Mesh(PushSum):
    """Push-sum among SuperNodes that talk to each other directly, all rounds inside one train message.

    Every SuperNode has an `address` HOST:PORT and `certificates`, a folder of `privdec certs`, in its node-config, and
    they must all run at once. If one of them has no address, behind NAT or in a simulation, the rounds are relayed
    through this ServerApp as `PushSum` does it; the log says which it is. A node that is started again goes on from
    its checkpoint when the run of the same name is started again.

    So Flower's loop runs only for relayed rounds. After direct rounds each peer evaluates its own model once, and the
    peers' mean is computed, as in PushSum.

    Args:
        topology: the graph's name.
        name: the name of the run and of the scenario for which the certificates were made.
        mode: asynchronous, in which a peer goes on without those that do not come in time; or synchronous.
        links: what connects the peers: local, lan or wan, see `network` in a scenario. A peer that has met no neighbour
            within a minute (wan: five), or within a longer deadline, fails.
        deadline: seconds that peers wait for each other, see `network` in a scenario.
        final_mixing: see `network` in a scenario.
        options: those of PushSum.

    Raises:
        ScenarioError: the graph has no name, or an option is out of range.

    Privacy: that of `PeerMod`. What the SuperLink and the ServerApp see: the graph, who is where, each peer's ε, and
    the mean at the end, of masked numbers; no share passes them. They introduce addresses and no keys, so that they
    cannot stand between two peers, whose certificates come from their owners.
    """

    def __init__(
        self,
        topology: str = "directed-exponential",
        *,
        name: str,
        mode: Literal["asynchronous", "synchronous"] = "asynchronous",
        links: Literal["local", "lan", "wan"] = "lan",
        deadline: float | None = None,
        final_mixing: int | Literal["auto"] = "auto",
        **options: Any,
    ) -> None:
        if not isinstance(topology, str):
            raise ScenarioError(
                f"topology={topology!r} of a mesh must be the name of a graph, which every node builds",
                code="mesh.setting",
            )
        if deadline is not None:
            check_numbers({"deadline": deadline})
            deadline = float(deadline)
        super().__init__(topology, name=name, **options)
        self._network: dict[str, Any] = {
            "mode": mode,
            "links": links,
            "deadline": deadline,
            "final_mixing": final_mixing,
        }
        # A scenario of any two peers refuses before the run what is wrong with the options.
        self._scenario(["127.0.0.1:1", "127.0.0.1:2"], 1)

    def _scenario(self, addresses: list[str], rounds: int) -> str:
        """Return what the peers agree on, as YAML."""
        n_peers = len(addresses)
        n_active = self._sampled(self.fraction_train, self.min_train_nodes, n_peers)
        participation: dict[str, Any] = {"kind": "all"}
        if n_active < n_peers:
            participation = {"kind": "uniform", "fraction": n_active / n_peers}

        section: dict[str, Any] = {
            "name": self.name,
            "seed": self.seed,
            "n_peers": n_peers,
            "rounds": rounds,
            "topology": {"name": self.topology, **self.topology_options},
            "participation": participation,
            "privacy": "none",
            "network": {**self._network, "hand_in": False, "peers": [{"address": address} for address in addresses]},
        }
        try:
            return to_yaml(AppScenario.model_validate(section))
        except ValueError as error:
            raise ScenarioError(f"a mesh cannot be: {' '.join(str(error).split())}", code="mesh.setting") from error

    def _run_rounds(self, loop: Callable[[], Any]) -> Any:
        """Let the peers run all rounds among themselves; relay them if a peer cannot be reached."""
        run = self._run
        network = run.network
        reports = network.reports
        unreachable = [peer for peer in range(network.n_peers) if peer not in reports or not reports[peer].address]
        if unreachable:
            log.info("Peers %s have no address: all rounds are relayed by this ServerApp", unreachable)
            return super()._run_rounds(loop)

        log.info("The peers talk to each other directly, for %s rounds; this ServerApp waits", run.rounds)
        if run.overridden:
            log.warning("A mesh has no rounds here, and calls none of %s", ", ".join(run.overridden))
        run.wants_mean = False
        run.recipients = sorted(reports)
        self._wait_for_peers()

        result = Result()
        last = run.rounds
        messages = self.configure_evaluate(last, run.initial, run.evaluate_config, network.grid)
        metrics = self.aggregate_evaluate(last, network.ask(messages).values())
        if metrics:
            result.evaluate_metrics_clientapp[last] = metrics

        mean = self._deliver()
        if mean is not None:
            result.arrays = mean
            run.mean_of = last
            metrics = self._evaluate(last, mean)
            if metrics:
                result.evaluate_metrics_serverapp[last] = metrics
        log.info("Final results:\n%s", result)
        return result

    def _wait_for_peers(self) -> None:
        """Introduce the peers to each other, and wait until all have run their rounds.

        Raises:
            RunError: a peer did not finish.
        """
        run = self._run
        network = run.network
        peers = run.recipients
        scenario = self._scenario([network.reports[peer].address for peer in peers], run.rounds)
        config = run.train_config
        config["server-round"] = 1
        records: dict[str, ArrayRecord | ConfigRecord] = {INITIAL: run.initial, self.configrecord_key: config}
        messages = [network.message(peer, "train", MESH, RecordDict({**records}), scenario=scenario) for peer in peers]
        done = network.ask(messages)

        network.raise_if_all_fail(peers)
        troubles = network.troubles()
        suffix = f" ({troubles})" if troubles else ""
        log.info("%s of %s peers are done%s", len(done), len(peers), suffix)
        missing = [peer for peer in peers if peer not in done]
        if missing:
            raise RunError(
                f"peers {missing} did not finish; start the run of the same name again", code="mesh.unfinished"
            )
