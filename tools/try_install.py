"""Install the wheel without extras and check what works, and that everything else names the extra it needs.

    python -m tools.try_install [--python PYTHON] [--sdist] [REQUIREMENT ...]
    python -m tools.try_install [--python PYTHON] --peer

builds the wheel, or that of flower-privdec-peer, installs it from the index into an empty environment, all its
dependencies with it (some 6 GB, some minutes; the peer 0.1 GB), and tries it there. Requirements are installed before
it, as torch's build for the CPU. PYTHON is another interpreter, as python3.13; with --sdist the wheel is built from the
source distribution in place of the checkout.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import tomllib
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

from flower_privdec.network.local.peer_processes import free_addresses
from tools.peer_wheel import build_peer_wheel

ROOT = Path(__file__).resolve().parents[1]
WORKING = [
    ["list"],
    ["show", "digits"],
    ["plan", "digits"],
    ["run", "digits", "--set", "rounds=4", "--out", "run"],
    ["study", "--list"],
    ["study", "digits", "--dry-run"],
]
FROM_CHECKOUT = [["bench"], ["network-bench"], ["soak", "digits", "--minutes", "1"]]
SHARDS = "data.partition={kind: shards, shards_per_peer: 2}"
SCATTERED = "features={kind: scattering, pool: 2}"
NEEDED = {
    "plots": [["topology", "digits", "--out", "graph.svg"]],
    "flower": [["guard", "policy.yaml", "flower-supernode"]],
    "simulation": [
        ["run", "digits", "--runtime", "flower", "--out", "not"],
        ["run", "digits", "--set", SHARDS, "--out", "not"],
    ],
    "features": [["run", "digits", "--set", SCATTERED, "--out", "not"]],
    "tensorboard": [["run", "digits", "--tensorboard", "--out", "not"]],
}

COMMANDS = """
import contextlib, io, json, sys
from flower_privdec.cli.main import main

found = []
for words in json.loads(sys.argv[1]):
    errors, status = io.StringIO(), 0
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            main(words)
        except SystemExit as left:
            status = left.code or 0
    found.append((status, errors.getvalue()))
print(json.dumps(found))
"""


SIZES = """
import importlib.metadata, json, re
from pathlib import Path

sizes = {}
for one in importlib.metadata.distributions():
    files = [Path(one.locate_file(file)) for file in one.files or ()]
    sizes[one.metadata["Name"].lower()] = sum(path.stat().st_size for path in files if path.is_file())
print(json.dumps(sizes))
"""
CUDA = ("nvidia", "cuda", "triton")  # what the build of torch for GPUs brings along


def footprint(binaries: Path, folder: Path) -> str:
    """Return how many packages are installed in an environment, and how large they are."""
    sizes = json.loads(call(binaries, folder, "python", "-I", "-c", SIZES))
    gpu = {name: size for name, size in sizes.items() if name.startswith(CUDA)}
    others = sum(size for name, size in sizes.items() if name not in gpu and name != "torch")
    return (
        f"{len(sizes)} packages, {sum(sizes.values()) / 1e9:.2f} GB: {len(gpu)} for NVIDIA GPUs "
        f"{sum(gpu.values()) / 1e9:.2f} GB, torch {sizes.get('torch', 0) / 1e9:.2f} GB, "
        f"the {len(sizes) - len(gpu) - 1} others {others / 1e9:.2f} GB"
    )


def build_wheel(folder: Path) -> Path:
    """Build the package's wheel from this checkout into a folder."""
    _call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    (wheel,) = folder.glob("flower_privdec-*.whl")
    return wheel


def build_sdist(folder: Path) -> Path:
    """Build the source distribution from this checkout into a folder."""
    backend = folder / "backend"
    venv.create(backend)
    python = backend / "bin" / "python"
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    _call(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *settings["build-system"]["requires"])
    subprocess.run([python, "-m", "hatchling", "build", "-t", "sdist", "-d", folder], cwd=ROOT, check=True)
    (sdist,) = folder.glob("flower_privdec-*.tar.gz")
    return sdist


def build_wheel_from_sdist(folder: Path) -> Path:
    """Build the source distribution from this checkout into a folder, and the wheel from it."""
    sdist = build_sdist(folder)
    _call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, sdist)
    (wheel,) = folder.glob("flower_privdec-*.whl")
    return wheel


def make_environment(folder: Path, wheel: Path, *options: str, python: str = sys.executable) -> Path:
    """Make an environment of an interpreter with the wheel in it, and return its folder of commands."""
    _call(python, "-m", "venv", "--without-pip", folder)
    binaries = folder / "bin"
    # This interpreter's pip installs into the environment: one of its own would take longer to make than the rest.
    _call(sys.executable, "-m", "pip", "--python", binaries / "python", "install", "--quiet", *options, wheel)
    return binaries


def _call(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True)


def call(binaries: Path, folder: Path, *words: str) -> str:
    """Run an installed command in a folder, with nothing of this checkout in sight, and return what it prints."""
    environment = {"PATH": f"{binaries}:/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    command = [str(binaries / words[0]), *words[1:]]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout


def privdec(binaries: Path, folder: Path, commands: list[list[str]]) -> list[tuple[int, str]]:
    """Run commands one after the other in one process, which imports all once; return each one's status and errors."""
    output = call(binaries, folder, "python", "-I", "-c", COMMANDS, json.dumps(commands))
    return [(status, errors) for status, errors in json.loads(output.splitlines()[-1])]


DATA = """
import numpy as np
for name, half in (("0", "train"), ("1", "train"), ("test", "test")):
    x = np.random.default_rng(len(name)).normal(size=(60, 5)).astype(np.float32)
    np.savez(name + ".npz", **{"x_" + half: x, "y_" + half: (x[:, 0] > 0).astype(np.int64)})
"""
SMALL = """\
name: small
n_peers: 2
rounds: 4
data: {dataset: npz, root: "{peer}.npz", test: test.npz, batch: {size: 12}}
model: {name: softmax}
algorithm: {name: privsgp, learning_rate: 0.5}
privacy: {epsilon: 3.0, delta: 1.0e-3}
evaluation: {every: 2}
network: {links: local, peers: [{address: "%s"}, {address: "%s"}]}
"""


def try_peers(binaries: Path, folder: Path, addresses: list[str]) -> list[dict[str, object]]:
    """Run two peers of a small scenario as on two devices, and return what each left as its last status.

    Each has an environment with nothing in it but the installed package. Other commands name what they lack.
    """
    call(binaries, folder, "python", "-I", "-c", DATA)
    (folder / "small.yaml").write_text(SMALL % tuple(addresses))
    call(binaries, folder, "privdec", "certs", "small.yaml")
    call(binaries, folder, "privdec", "list")

    environment = {"PATH": f"{binaries}:/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    words = ["peer", "small.yaml", "--certs", "certs"]
    running = []
    for peer in ("0", "1"):
        command = [str(binaries / "privdec"), *words, "--id", peer, "--out", f"peer-{peer}"]
        running.append(subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True))
    for process in running:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert "is small: on NumPy, without torch (torch is not installed)" in errors, errors

    [(status, errors)] = privdec(binaries, folder, [["run", "small.yaml", "--out", "not"]])
    assert status == 2, errors
    assert errors.startswith("error: this needs torch, which is not installed"), errors
    assert errors.count("\n") == 1, errors
    return [json.loads((folder / f"peer-{peer}" / "summary.json").read_text()) for peer in (0, 1)]


def try_it(binaries: Path, folder: Path) -> None:
    """Check that what needs an extra or a checkout says so in one line, and that everything else works."""
    call(binaries, folder, "privdec", *WORKING[0])

    needed = [(extra, words) for extra, commands in NEEDED.items() for words in commands]
    everything = [*WORKING, *(words for _, words in needed), *FROM_CHECKOUT]
    results = iter(privdec(binaries, folder, everything))

    for words in WORKING:
        status, errors = next(results)
        assert status == 0, (words, errors)

    for extra, words in needed:
        status, errors = next(results)
        assert status == 2, (words, errors)
        (line,) = errors.splitlines()
        assert line.startswith("error: "), line
        assert f"pip install 'flower-privdec[{extra}]'" in line, line

    for words in FROM_CHECKOUT:
        status, errors = next(results)
        assert status == 2, (words, errors)
        assert errors.startswith(f"error: `privdec {words[0]}` needs a source checkout"), errors
        assert errors.count("\n") == 1, errors

    assert not (folder / "not").exists()


def main(words: list[str]) -> None:
    """Build, install and try the package, or the small peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that it is tried with")
    parser.add_argument("--peer", action="store_true", help="try the small peer")
    parser.add_argument("--sdist", action="store_true", help="build the wheel from the source distribution")
    parser.add_argument("requirements", nargs="*", help="what is installed before it")
    given = parser.parse_args(words)

    with TemporaryDirectory() as temporary:
        place = Path(temporary)
        began = time.monotonic()
        if given.peer:
            wheel = build_peer_wheel(place)
        elif given.sdist:
            wheel = build_wheel_from_sdist(place)
        else:
            wheel = build_wheel(place)
        binaries = make_environment(place / "environment", wheel, *given.requirements, python=given.python)

        version = call(binaries, place, "python", "-I", "--version").strip()
        print(f"{version}: installed in {time.monotonic() - began:.0f} s: {footprint(binaries, place)}", flush=True)
        if given.peer:
            try_peers(binaries, place, free_addresses(2))
            print("installed the small peer: two of them train, and all that needs more names it")
            return
        try_it(binaries, place)
    print("installed without extras: all that needs none works, and all that needs one names it")


if __name__ == "__main__":
    main(sys.argv[1:])
