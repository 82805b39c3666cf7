"""The strategies on a deployment: a SuperLink and SuperNodes as processes of their own, with TLS between them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from paths import ROOT

from flower_privdec.privacy.ledger.segments import read_chain
from tools.flower_deployed.deployment import Deployment

pytestmark = [pytest.mark.slow, pytest.mark.versions]

APP = ROOT / "simulations" / "adapted-quickstart-sklearn" / "after"
PEERS, ROUNDS = 2, 1


def test_supernodes_behind_tls_train_charge_and_seal(tmp_path: Path) -> None:
    shutil.copytree(APP, tmp_path / "app", ignore=shutil.ignore_patterns("__pycache__"))
    with Deployment(tmp_path, PEERS, poll=0.5, variables={"OMP_NUM_THREADS": "1"}) as flower:
        flower.start_superlink()
        for peer in range(PEERS):
            flower.start_node(peer)
        said = flower.flwr("run", "app", "here", "--stream", "--run-config", f"num-server-rounds={ROUNDS}")
    assert f"{PEERS} of {PEERS} peers trained" in said, said[-3000:]
    assert "Shares are sealed between the peers" in said
    for peer in range(PEERS):
        assert len(read_chain(flower.peer_folder(peer) / "peer-updates.jsonl")[1]) == ROUNDS
