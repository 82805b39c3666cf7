"""Metrics and health of a peer: what programs on its device may ask, and what they cost."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from command_line import privdec
from networked import LONG, devices, driver_of, running
from ports import own_addresses
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from raising import raises
from tiny_scenario import Tiny

from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.network.local.peer_processes import metrics_of, on_this_machine
from flower_privdec.network.peer.durations import Durations
from flower_privdec.network.peer.exposition import exposed
from flower_privdec.network.peer.foreground import running_peer
from flower_privdec.network.peer.lifetime import DONE, KILLED, End, Lifetime, read_process
from flower_privdec.network.peer.telemetry import Telemetry, TelemetryServer, is_loopback_host

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
UNITS = ("_seconds", "_bytes", "_total", "_info")
# All that counts something without a unit, or has none: a new name is a decision.
PLAIN = {
    *("privdec_state", "privdec_round", "privdec_planned_rounds", "privdec_public_loss", "privdec_public_metric"),
    *(
        "privdec_epsilon",
        "privdec_epsilon_budget",
        "privdec_epsilon_left",
        "privdec_neighbours",
        "privdec_neighbour_up",
    ),
    *("privdec_neighbour_round", "privdec_neighbour_awaited", "privdec_suspected_neighbours", "privdec_noise_partners"),
}


class Stand:
    """Stands in for a driver whose peer has a status."""

    def __init__(self, status: dict[str, Any], quiet: float = 0.0) -> None:
        self.commits = Durations()
        self.quiet = quiet
        self._status = status

    def status(self) -> dict[str, Any]:
        return self._status

    def quiet_seconds(self) -> float:
        return self.quiet


@pytest.fixture(scope="module")
def status() -> dict[str, Any]:
    """Return the status of a peer with one neighbour that is down, one that is silent and one that it waits for."""
    known = {str(j): {"round": j, "answered": 10 * j, "failed": j, "awaited": j == 3} for j in (1, 2, 3)}
    return {
        **{"name": "tiny", "peer": 0, "round": 5, "rounds": 9, "waits_for": "", "neighbours": [1, 2, 3]},
        **{"down": {"1": "off"}, "unheard": [2], "quorum": 1, "known": known, "quarantined": {}, "doubted": {}},
        **{"seconds": 3.0, "bytes_sent": 7, "bytes_received": 8, "loss": 0.5, "figures": {"accuracy": 0.75}},
        **{"epsilon": 1.5, "budget": 2.0, "adversaries": {"colluding-1": 1.5, "all": "inf"}},
        **{"partners": 3, "shares_noise_with": 2, "noise": "system"},
    }


def telemetry_of(status: dict[str, Any], tmp_path: Path) -> tuple[Telemetry, Stand]:
    Lifetime(tmp_path)
    lifetime = Lifetime(tmp_path)
    told = Telemetry('a"b\\n{}', 0, "1.0")
    stand = Stand(status)
    stand.commits.add(0.003)
    stand.commits.add(99.0)
    told.attach(stand, lifetime, lambda: 2e9)
    return told, stand


def samples(content: bytes) -> dict[tuple[str, tuple[str, ...]], float]:
    families = text_string_to_metric_families(content.decode())
    return {(one.name, tuple(one.labels.values())): one.value for family in families for one in family.samples}


def test_metrics_are_parsed_by_prometheus_own_parser(status: dict[str, Any], tmp_path: Path) -> None:
    told, _ = telemetry_of(status, tmp_path)
    content, _ = exposed(told, "")
    found = samples(content)
    assert found["privdec_epsilon", ("colluding-1",)] == 1.5
    assert found["privdec_epsilon", ("all",)] == math.inf
    assert found["privdec_epsilon_left", ("colluding-1",)] == 0.5
    assert found["privdec_neighbours", ("up",)] == found["privdec_neighbours", ("down",)] == 1
    assert found["privdec_calls_failed_total", ("3",)] == 3
    assert found["privdec_neighbour_awaited", ("3",)] == 1
    assert found["privdec_commit_seconds_bucket", ("0.005",)] == 1
    assert found["privdec_commit_seconds_bucket", ("+Inf",)] == found["privdec_commit_seconds_count", ()] == 2
    assert found["privdec_starts_total", ()] == 2
    assert found["privdec_last_exit_info", (KILLED, "")] == 1
    assert found["privdec_state", ("training",)] == 1
    assert abs(found["privdec_last_commit_timestamp_seconds", ()] - time.time()) < LONG
    content, kind = exposed(told, OPENMETRICS)
    assert kind.startswith("application/openmetrics-text")
    assert [*openmetrics.text_string_to_metric_families(content.decode())]


def test_names_follow_the_conventions(status: dict[str, Any], tmp_path: Path) -> None:
    content, _ = exposed(telemetry_of(status, tmp_path)[0], "")
    families = [*text_string_to_metric_families(content.decode())]
    for family in families:
        assert family.name.startswith("privdec_")
        assert family.documentation.endswith(".")
        kinds = {one.name for one in family.samples}
        assert (family.type == "counter") == all(name.endswith("_total") for name in kinds), family.name
        assert family.name in PLAIN or any(name.endswith(UNITS) for name in (family.name, *kinds)), family.name
    # How long a step takes, and what it needs, follow from its batch.
    named = " ".join(family.name for family in families)
    assert not any(word in named for word in ("train", "step", "cpu", "memory", "batch", "work"))


def test_health_says_why_in_its_status_code(status: dict[str, Any], tmp_path: Path) -> None:
    told, stand = telemetry_of(status, tmp_path)
    (address,) = own_addresses(1)
    with TelemetryServer(address, told):
        assert get(address, "/live") == (200, {"ok": True, "reasons": []})
        code, said = get(address, "/ready")
        assert code == 200
        assert said["reasons"] == ["peer 1: off", "peer 2 has not reported yet"]
        status_before = stand._status
        stand._status = status_before | {"quorum": 2, "waits_for": "2 of its neighbours"}
        code, said = get(address, "/ready")
        assert (code, said["ok"], said["reasons"][-1]) == (503, False, "it waits for 2 of its neighbours")
        stand.quiet = 1e3
        assert get(address, "/live")[0] == get(address, "/ready")[0] == 503
        starting = Telemetry("tiny", 0, "1.0")
        assert starting.live() == (True, ["starting"])
        assert starting.ready() == (False, ["starting"])
        assert samples(exposed(starting, "")[0])["privdec_state", ("starting",)] == 1


def get(address: str, path: str, host: str | None = None) -> tuple[int, Any]:
    """Return the status code of an answer, and its content."""
    call = urllib.request.Request(f"http://{address}{path}")
    if host is not None:
        call.add_header("Host", host)
    try:
        with urllib.request.urlopen(call, timeout=LONG) as answer:
            code, content = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        code, content = error.code, error.read()
    return code, json.loads(content) if content.startswith(b"{") else content


def test_a_page_of_the_web_reads_nothing(status: dict[str, Any], tmp_path: Path) -> None:
    """A name of somebody's own, whose address is then changed to this device's, is no name of loopback."""
    told, _ = telemetry_of(status, tmp_path)
    (address,) = own_addresses(1)
    with TelemetryServer(address, told):
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.7", ""):
            code, said = get(address, "/metrics", host)
            assert code == 403, host
            assert b"privdec_" not in said
        assert get(address, "/metrics", "localhost:9464")[0] == 200
        assert get(address, "/nothing")[0] == 404
    for host in ("LOCALHOST", "[::1]:80", "[::1]", "127.1.2.3:80"):
        assert is_loopback_host(host)


def test_silent_callers_stop_no_probe(status: dict[str, Any], tmp_path: Path) -> None:
    told, _ = telemetry_of(status, tmp_path)
    (address,) = own_addresses(1)
    host, _, port = address.partition(":")
    with TelemetryServer(address, told):
        silent = [socket.create_connection((host, int(port))) for _ in range(6)]
        assert get(address, "/live")[0] == 200
        for one in silent:
            one.close()


def test_an_address_that_others_reach_is_refused(tmp_path: Path, tiny: Tiny) -> None:
    told = Telemetry("tiny", 0, "1.0")
    for address in ("0.0.0.0:9464", "10.0.0.7:9464", "example.org:9464", "[::]:9464"):
        with raises(ScenarioError, "metrics.exposed", names="--expose-metrics"):
            TelemetryServer(address, told)
        with raises(ScenarioError, "metrics.exposed", names="expose-metrics"):
            tiny(f"network.metrics='{address}'")
    for address in ("9464", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:99999", "http://127.0.0.1:9464"):
        with raises(ScenarioError, "network.address", names="metrics"):
            TelemetryServer(address, told)
    (taken,) = own_addresses(1)
    with TelemetryServer(taken, told), raises(RunError, "metrics.listen", names=taken):
        TelemetryServer(taken, told)
    (address,) = own_addresses(1)
    with TelemetryServer(address.replace("127.0.0.1", "0.0.0.0"), told, exposed=True):
        assert get(address, "/live", "device.example")[0] == 200


def test_peers_of_one_machine_have_a_port_each(tiny: Tiny) -> None:
    assert [metrics_of("[::1]:9464", peer) for peer in (0, 3)] == ["[::1]:9464", "[::1]:9467"]
    assert on_this_machine(tiny("network.metrics='127.0.0.1:65532'")).network.metrics == "127.0.0.1:65532"
    with raises(ScenarioError, "network.address", names="127.0.0.1:65536"):
        on_this_machine(tiny("network.metrics='127.0.0.1:65533'"))


def test_a_taken_port_ends_the_peer_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (address,) = own_addresses(1)
    told = Telemetry("tiny", 0, "1.0")
    words = ["--id", 0, "--certs", tmp_path / "none", "--metrics", address]
    with TelemetryServer(address, told):
        assert privdec("peer", "digits", *words) == 1
    assert f"{address} cannot be listened on" in capsys.readouterr().err


def test_a_real_peer_tells_what_its_status_says(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny("n_peers=2", "network.links=local", "rounds=3")
    peers = [running_peer(scenario, device) for device in devices(scenario, tmp_path, memory=True)]
    told = Telemetry("tiny", 0, "1.0")
    with running(peers) as futures:
        driver = driver_of(peers[0])
        told.attach(driver, Lifetime(tmp_path / "peer-0"), lambda: None)
        for future in futures:
            future.result(LONG)
    found = samples(exposed(told, "")[0])
    status = driver.status()
    assert found["privdec_round", ()] == status["round"] == 3
    assert found["privdec_epsilon", ("all",)] == status["epsilon"] > 0
    assert found["privdec_public_metric", ("accuracy",)] == status["figures"]["accuracy"]
    assert found["privdec_sent_bytes_total", ()] == status["bytes_sent"] > 0
    assert found["privdec_commit_seconds_count", ()] >= 3
    assert status["known"]["1"]["answered"] > 0


def test_how_a_process_ended_is_known_to_the_next(tmp_path: Path) -> None:
    folder = tmp_path
    path = folder / "process.json"
    assert read_process(path) is None
    first = Lifetime(folder)
    assert (first.starts, first.before) == (1, None)
    second = Lifetime(folder)
    assert (second.starts, second.before) == (2, End(KILLED))
    end = End(DONE, 0, "", "2026-05-04T10:20:30+00:00")
    second.end(end)
    assert Lifetime(folder).before == end
    for torn in (b"", b"{", b"[]", b'{"starts": "x"}', b'{"starts": 1e999, "began": 1, "process": 1, "end": null}'):
        path.write_bytes(torn)
        assert read_process(path) is None
        assert Lifetime(folder).starts == 1


def test_nothing_is_imported_or_started_without_metrics() -> None:
    code = "import flower_privdec.network.peer.foreground, sys; print('prometheus_client' in sys.modules)"
    code += "; print(any(name.startswith(('http.server', 'uvicorn', 'starlette')) for name in sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["False", "False"]
