"""Where the links of a page lead on the site: pages of `docs/` stand at its root there, beside the repository's files.

docs/epsilon.md          epsilon.md
CHANGELOG.md             CHANGELOG.md
results/x/README.md      results/x/README.md
docs/notebooks/x.ipynb   notebooks/x.md, a page that is made from it
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = (  # files outside docs/ that the site has, each at its path
    "results/**/*.*",
    "scenarios/**/*.yaml",
    "simulations/*/README.md",
    "simulations/*/*study.yaml",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
)
CODE = r"(?P<code>^```.*?^```$|`[^`\n]+`)"
LINK = re.compile(  # but those to other sites, and within a page
    CODE + r"|\]\((?P<target>(?!\w+:)[^)\s#]+)(?P<anchor>#[^)\s]*)?\)", re.MULTILINE | re.DOTALL
)


def shipped() -> list[Path]:
    """Return the files outside docs/ that the site has."""
    return [path for pattern in SHIPPED for path in sorted(ROOT.glob(pattern))]


def place_on_site(path: str) -> str:
    """Return where a file of the repository stands on the site; both are paths from the root."""
    path = path.removeprefix("docs/")
    if path.endswith(".ipynb"):
        return path.removesuffix(".ipynb") + ".md"
    return path


def targets(markdown: str, path: str) -> list[str]:
    """Return the files that a page's links name, as paths from the root of the repository."""
    folder = posixpath.dirname(path)
    found = [link["target"] for link in LINK.finditer(markdown)]
    return [posixpath.normpath(posixpath.join(folder, target)) for target in found if target]


def rewritten(markdown: str, path: str) -> str:
    """Return a page of the repository with its links as they are on the site.

    Args:
        path: of the page, from the root of the repository.
    """
    folder = posixpath.dirname(path)
    folder_there = posixpath.dirname(place_on_site(path))

    def link(found: re.Match[str]) -> str:
        if found["code"]:
            return found[0]
        target = posixpath.normpath(posixpath.join(folder, found["target"]))
        there = posixpath.relpath(place_on_site(target), folder_there or ".")
        return f"]({there}{found['anchor'] or ''})"

    return LINK.sub(link, markdown)
