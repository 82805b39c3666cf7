"""The recipe for a tunnel: its files and the scenario beside them fit each other. No tunnel is made."""

from __future__ import annotations

import re
from ipaddress import ip_interface, ip_network

import yaml
from paths import ROOT

PAGE = ROOT / "docs/how-to/addresses.md"
KEYS = {
    "Interface": {"Address", "ListenPort", "PrivateKey"},
    "Peer": {"PublicKey", "AllowedIPs", "Endpoint", "PersistentKeepalive"},
}
Sections = list[tuple[str, dict[str, str]]]


def blocks(kind: str, title: str) -> dict[str, str]:
    """Return the page's blocks of a kind by what a pattern of their titles captures."""
    found = re.findall(rf'^```{kind} title="{title}"\n(.*?)^```', PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return dict(found)


def sections(text: str) -> Sections:
    """Read a file of wg-quick, in which sections may repeat; a line is a section, or KEY = VALUE."""
    found: Sections = []
    for line in filter(None, text.splitlines()):
        section = re.fullmatch(r"\[(\w+)\]", line)
        if section:
            found.append((section[1], {}))
            continue
        key, value = line.split(" = ")
        name, keys = found[-1]
        assert key in KEYS[name], line
        assert key not in keys, line
        keys[key] = value
    return found


def test_the_tunnels_files_fit_each_other_and_the_scenario() -> None:
    machines = {name: sections(text) for name, text in blocks("ini", r"wg0-([a-z0-9-]+)\.conf").items()}
    hub = machines.pop("hub")
    scenario = yaml.safe_load(blocks("yaml", r"(tunnel\.yaml)")["tunnel.yaml"])
    assert [name for name, _ in hub] == ["Interface", *["Peer"] * len(machines)]
    network = ip_interface(hub[0][1]["Address"]).network
    routes = {peer["PublicKey"]: ip_network(peer["AllowedIPs"]) for _, peer in hub[1:]}
    assert hub[0][1]["PrivateKey"] == "<private.key of hub>"

    addresses = []
    for name, [(_, own), (_, other)] in machines.items():
        device = name.replace("-", " ")
        place = ip_interface(own["Address"])
        assert own["PrivateKey"] == f"<private.key of {device}>"
        assert routes.pop(f"<public.key of {device}>") == ip_network(place.ip)
        assert other["PublicKey"] == "<public.key of hub>"
        assert other["Endpoint"].rpartition(":")[2] == hub[0][1]["ListenPort"]
        assert ip_network(other["AllowedIPs"]) == place.network == network
        assert int(other["PersistentKeepalive"]) > 0  # a device behind a router stays reached
        addresses.append(str(place.ip))
    assert routes == {}
    assert [peer["address"].rpartition(":")[0] for peer in scenario["network"]["peers"]] == addresses
    assert len(addresses) == scenario["n_peers"]
