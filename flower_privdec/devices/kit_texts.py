"""The texts of a device's kit: its environment file, its unit, its Containerfile and its README."""

from __future__ import annotations

from dataclasses import dataclass

from flower_privdec.common.exit_codes import FINISHED, Restart, statuses

SCENARIO = "scenario.yaml"
ENVIRONMENT = "peer.env"
CERTIFICATES = "certs"
CONTAINERFILE = "Containerfile"
README = "README.md"
UNIT_ENDING = ".service"
USER = "privdec"
FIRST_RESTART = 10  # seconds
LAST_RESTART = 900


@dataclass(frozen=True)
class DeviceText:
    """What the texts of a device say.

    Attributes:
        name: of the kit's folder, the unit and the state: NAME-I.
        peer: its number.
        scenario_name: of the run.
        address: HOST:PORT at which the others reach it; empty if it only dials out.
        listens: HOST:PORT that it listens on; empty if it does not.
        folder, state, program: see `KitPlaces`; of this device.
        data: the path of its own data; None if they come with the package.
        has_modules: whether the kit has code of the user's own.
        uses_gpu: whether it may use a GPU.
        version: of this package, on the operator's machine.
    """

    name: str
    peer: int
    scenario_name: str
    address: str
    listens: str
    folder: str
    state: str
    program: str
    data: str | None
    has_modules: bool
    uses_gpu: bool
    version: str

    @property
    def unit(self) -> str:
        """Return the file name of its unit."""
        return f"privdec-{self.name}{UNIT_ENDING}"


def environment(text: DeviceText) -> str:
    """Return the environment file, which the unit, a container and `privdec doctor` read."""
    lines = [
        "# What `privdec peer` and `privdec doctor` need to know on this device: KEY=VALUE, without quotes.",
        f"PRIVDEC_SCENARIO={text.folder}/{SCENARIO}",
        f"PRIVDEC_ID={text.peer}",
        f"PRIVDEC_CERTS={text.folder}/{CERTIFICATES}",
        "# What it writes: state, ledger and model. Back it up only while the peer does not run.",
        f"PRIVDEC_OUT={text.state}/peer",
        f"XDG_CACHE_HOME={text.state}/cache",
    ]
    if text.data is not None:
        lines += ["# This device's own examples, which nobody else gets.", f"PRIVDEC_DATA={text.data}"]

    lines += [
        "# Where it listens, HOST:PORT, if not where the scenario says; 0.0.0.0:7100 is every address of this device,",
        "# and [::]:7100 those of IPv6, too.",
        "#PRIVDEC_LISTEN=",
        "# yes: if this device loses its folder, it charges what its neighbours have counted, and goes on by itself.",
        "PRIVDEC_CHARGE_WITNESSED=no",
        "# The ε that this device may spend in all if the run is given more rounds; left out, privacy.epsilon.",
        "# PRIVDEC_MAX_EPSILON=4",
        "# yes: it goes on although its data changed, and its ledger charges for both. Once it runs, set it to no.",
        "PRIVDEC_NEW_DATA=no",
        "# yes: a linear or small model runs on NumPy, without torch, in a sixth of the memory.",
        "PRIVDEC_SMALL=no",
        "# The longest wait, in seconds, before a peer that ended again and again is started once more.",
        f"PRIVDEC_BACK_OFF={LAST_RESTART}",
        "# The version that made this kit, which `privdec doctor` compares.",
        f"PRIVDEC_KIT={text.version}",
    ]

    if text.has_modules:
        lines += ["# The scenario's own code.", f"PYTHONPATH={text.folder}"]
    return "\n".join(lines) + "\n"


def unit(text: DeviceText) -> str:
    """Return the systemd unit."""
    done = " ".join(str(status) for status in statuses(Restart.DONE) if status != FINISHED)
    stays_down = " ".join(map(str, statuses(Restart.OWNER)))
    if text.state.startswith("/var/lib/"):
        state = f"StateDirectory={text.state.removeprefix('/var/lib/')}\nStateDirectoryMode=0700"
    else:
        state = f"ReadWritePaths={text.state}"
    devices = "PrivateDevices=yes"
    if text.uses_gpu:
        devices = "# It may use a GPU, so devices are not hidden from it."
    return f"""\
# Made by `privdec deploy`. Settings of the device are in {ENVIRONMENT}; `systemctl edit` changes this unit.
[Unit]
Description=privdec peer {text.peer} of {text.name.rpartition("-")[0]}
Wants=network-online.target time-sync.target
After=network-online.target time-sync.target
StartLimitIntervalSec=0

[Service]
Type=exec
User={USER}
EnvironmentFile={text.folder}/{ENVIRONMENT}
ExecStart={text.program} peer
{state}
WorkingDirectory={text.state}

# By exit code (`privdec` prints the table in its docs, "Every command"): what is done stays down, and so does what its
# owner has to see to. All else is started again, after {FIRST_RESTART} seconds; the peer itself waits longer each time,
# up to PRIVDEC_BACK_OFF.
Restart=on-failure
RestartSec={FIRST_RESTART}
SuccessExitStatus={done}
RestartPreventExitStatus={stays_down}
TimeoutStopSec=60

# A peer reads its kit and its data, writes its state, and talks to its neighbours; nothing else.
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
{devices}
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
RemoveIPC=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
UMask=0077
LimitNOFILE=4096

[Install]
WantedBy=multi-user.target
"""


def containerfile(text: DeviceText) -> str:
    """Return the Containerfile: the program, and nothing of the device's."""
    listens = "It listens to nobody, and dials its neighbours."
    if text.listens:
        listens = f"It listens on port {text.listens.rpartition(':')[2]}."
    mounts = [f"-v {text.folder}:{text.folder}:ro", f"-v {text.state}:{text.state}"]
    if text.data is not None and not text.data.startswith(f"{text.state}/"):
        mounts.append(f"-v {text.data}:{text.data}:ro")
    common = [f"--env-file {text.folder}/{ENVIRONMENT}", *mounts]
    options = " ".join(["--network host", *common])
    mapped = ""
    if text.address and text.listens:
        # The device has the port that it would listen on itself: a router may forward another one to it.
        port = text.listens.rpartition(":")[2]
        anywhere = "[::]" if text.address.startswith("[") else "0.0.0.0"
        listening = [f"-p {port}:{port}", f'-e "PRIVDEC_LISTEN={anywhere}:{port}"']
        mapped = f"""\
# In a network of its own, a container listens on all of its addresses, and a port of the device is mapped to it:
#
#   podman run --rm --name privdec-{text.name} {" ".join([*listening, *common])} privdec
#
"""
    return f"""\
# The program in a container. Keys and data stay outside of the image, at the paths that {ENVIRONMENT} names:
#
#   podman build -t privdec {text.folder}
#   podman run --rm --name privdec-{text.name} {options} privdec
#
{mapped}# {listens} Its exit code is the peer's, by which what starts it should decide, as the unit does.
FROM docker.io/library/python:3.12-slim
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu \\
 && pip install --no-cache-dir flower-privdec=={text.version}
ENTRYPOINT ["privdec", "peer"]
"""


def readme(text: DeviceText) -> str:
    """Return the README: what is here, and the three commands."""
    programs = text.program.rpartition("/")[0]
    environment_folder = programs.rpartition("/")[0] or "/"
    data = "Its data come with the package."
    if text.data is not None:
        data = f"Its own data belong to `{text.data}` (`PRIVDEC_DATA`), readable for the user `{USER}`."
    return f"""\
# Peer {text.peer} of {text.scenario_name}

All that this device gets: copy this folder to `{text.folder}` on it, and to no other. {data}

Once, the user that the peer runs as, and the program (without a GPU, install torch's build for the CPU first):

    sudo useradd --system {USER}; sudo chown -R {USER}: {text.folder}; sudo install -d -o {USER} -m 0700 {text.state}
    sudo python3 -m venv {environment_folder} && sudo {programs}/pip install flower-privdec=={text.version}

Then three commands: look at everything, start the peer, and watch it.

    sudo -u {USER} {text.program} doctor {text.folder}/{SCENARIO} --id {text.peer}
    sudo systemctl enable --now {text.folder}/{text.unit}
    journalctl -fu {text.unit}

The model is `{text.state}/peer/model.safetensors`, and its ε is in `summary.json` beside it, once the rounds are done.

| file | what it is |
|---|---|
| `{SCENARIO}` | the run, on which all devices agree, and the addresses |
| `{CERTIFICATES}/` | this device's certificate and key, and the authority's certificate |
| `{ENVIRONMENT}` | settings of this device |
| `{text.unit}` | its unit |
| `Containerfile` | the same in a container |
"""
