"""A strategy whose peers talk to each other directly: the ServerApp introduces them, and waits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.serverapp.strategy import Result

from flower_privdec.common.arguments import check_numbers
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.flower.mods.peer_mod import INITIAL, MESH
from flower_privdec.flower.strategies.push_sum import PushSum
from flower_privdec.scenario import to_yaml
from flower_privdec.scenario.sections import AppScenario

log = logging.getLogger("flwr.privdec")


class Mesh(PushSum):
    """Push-sum among SuperNodes that talk to each other directly, all rounds inside one train message.

    Every SuperNode has an `address` HOST:PORT and `certificates`, a folder of `privdec certs`, in its node-config, and
    they must all run at once. Where one of them has no address, behind NAT or in a simulation, the rounds are relayed
    through this ServerApp as `PushSum` does it; the log says which it is. A node that is started again goes on from
    its checkpoint when the run of the same name is started again.

    After the rounds each peer evaluates its own model once, and the peers' mean is computed, as in PushSum.

    Args:
        topology: the graph's name.
        name: of the run and of the scenario for which the certificates were made.
        mode: asynchronous, where a peer goes on without those who do not come in time; or synchronous.
        deadline: seconds that peers wait for each other, see `network` in a scenario.
        start: seconds that they wait for their neighbours at first; one that has met none by then fails.
        final_mixing: see `network` in a scenario.
        options: those of PushSum.

    Raises:
        ScenarioError: the graph is no named one, or an option out of its range.

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
        deadline: float = 10.0,
        start: float = 60.0,
        final_mixing: int | Literal["auto"] = "auto",
        **options: Any,
    ) -> None:
        if not isinstance(topology, str):
            raise ScenarioError(
                f"topology={topology!r} of a mesh must be the name of a graph, which every node builds",
                code="mesh.setting",
            )
        for option, value in (("deadline", deadline), ("start", start)):
            if value is None:
                raise ScenarioError(
                    f"{option}=None must be a number of seconds; leave it out for the usual one", code="mesh.setting"
                )
        check_numbers({"deadline": deadline, "start": start})
        super().__init__(topology, name=name, **options)
        self._network: dict[str, Any] = {
            "mode": mode,
            "deadline": float(deadline),
            "start": float(start),
            "give_up": float(start),
            "final_mixing": final_mixing,
        }
        self._scenario([f"127.0.0.1:{port}" for port in (1, 2)], 1)  # which refuses what is wrong before the run

    def _scenario(self, addresses: list[str], rounds: int) -> str:
        """Return what the peers agree on, as YAML."""
        count = self._sampled(self.fraction_train, self.min_train_nodes, len(addresses))
        share = count / len(addresses)
        section: dict[str, Any] = {
            "name": self.name,
            "seed": self.seed,
            "n_peers": len(addresses),
            "rounds": rounds,
            "topology": {"name": self.topology, **self.topology_options},
            "participation": {"kind": "all"} if share == 1 else {"kind": "uniform", "fraction": float(share)},
            "privacy": "none",
            "network": {**self._network, "hand_in": False, "peers": [{"address": address} for address in addresses]},
        }
        try:
            return to_yaml(AppScenario.model_validate(section))
        except ValueError as error:
            raise ScenarioError(f"a mesh cannot be: {' '.join(str(error).split())}", code="mesh.setting") from error

    def _run(self, rounds: Callable[[], Any]) -> Any:
        """Let the peers run all rounds among themselves; relay them where a peer cannot be reached."""
        network = self.network
        reports = self.reports
        unreachable = [peer for peer in range(network.n_peers) if peer not in reports or not reports[peer].address]
        if unreachable:
            log.info("Peers %s have no address: all rounds are relayed by this ServerApp", unreachable)
            return super()._run(rounds)
        log.info("The peers talk to each other directly, for %s rounds; this ServerApp waits", self._rounds)
        if self._overridden:
            log.warning("A mesh has no rounds here, and calls none of %s", ", ".join(self._overridden))
        self._wants_mean, config = False, self._given["train_config"] or ConfigRecord()
        config["server-round"] = 1
        scenario = self._scenario([reports[peer].address for peer in sorted(reports)], self._rounds)
        records: dict[str, ArrayRecord | ConfigRecord] = {INITIAL: self._initial, self.configrecord_key: config}
        peers = sorted(reports)
        messages = [network.message(peer, "train", MESH, RecordDict({**records}), scenario=scenario) for peer in peers]
        done = network.ask(messages)
        network.raise_if_all_fail(peers)
        log.info(
            "%s of %s peers are done%s",
            len(done),
            len(peers),
            f" ({troubles})" if (troubles := network.troubles()) else "",
        )
        if missing := sorted(set(peers) - done.keys()):
            raise RunError(
                f"peers {missing} did not finish; start the run of the same name again", code="mesh.unfinished"
            )
        result = Result()
        last = self._rounds
        self._asked = peers
        evaluated = network.ask(
            self.configure_evaluate(last, self._initial, self._given["evaluate_config"] or ConfigRecord(), network.grid)
        )
        if metrics := self.aggregate_evaluate(last, evaluated.values()):
            result.evaluate_metrics_clientapp[last] = metrics
        if (mean := self._deliver()) is not None:
            result.arrays = mean
            self._mean_of = last
            if metrics := self._evaluate(last, mean):
                result.evaluate_metrics_serverapp[last] = metrics
        log.info("Final results:\n%s", result)
        return result
