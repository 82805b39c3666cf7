"""Run tests on other versions of Flower than the installed one: `python -m tools.flower_versions REQUIREMENT ...`.

    python -m tools.flower_versions flwr==1.42.0 flwr-nightly [-- PYTHON ARGUMENTS]

The environment has the oldest version that is supported. Each requirement is installed without its dependencies into a
temporary folder, which comes first on PYTHONPATH, so that what runs and every process that it starts import it, and
nothing of the environment changes. Without PYTHON ARGUMENTS it runs the tests marked `versions`; with them another
command of Python's, such as `-- -m tools.flower_deployed.events`. Exits with 1 if it fails on any version.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
MARKED = ["-m", "pytest", "tests/flower", "-m", "versions"]
SHOW = "import flwr; print(flwr.__file__)"


def main(words: list[str]) -> int:
    """Run a command of Python's on each version; return the exit status."""
    requirements = words
    chosen = MARKED
    if "--" in words:
        end = words.index("--")
        requirements = words[:end]
        chosen = words[end + 1 :]
    if not requirements:
        print(__doc__, file=sys.stderr)
        return 2

    failed = [one for one in requirements if not passes_on(one, chosen)]
    for requirement in failed:
        print(f"{requirement}: {' '.join(chosen)} failed, see above", file=sys.stderr)
    return 1 if failed else 0


def passes_on(requirement: str, chosen: list[str]) -> bool:
    """Install a version beside the environment, and run a command of Python's on it."""
    with TemporaryDirectory() as folder:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "--no-deps", "--pre", "--target", folder, requirement], check=True)

        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(ROOT)])}
        imported = subprocess.run(
            [sys.executable, "-c", SHOW], env=environment, check=True, capture_output=True, text=True
        )
        # On the installed version a test would pass for the wrong reason.
        if not imported.stdout.startswith(folder):
            raise RuntimeError(f"{requirement}: {imported.stdout.strip()} is imported in its place")

        print(f"{requirement}:", flush=True)
        done = subprocess.run([sys.executable, *chosen], env=environment, cwd=ROOT, check=False)
        return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
