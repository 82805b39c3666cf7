"""Hooks that mkdocs calls while it builds the site: parts of pages that are made from the code, and linked files."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # mkdocs loads this file by its path
from tools.docs import made  # noqa: E402

SHIPPED = ("results/**/*.*", "scenarios/**/*.yaml", "simulations/*/README.md", "CONTRIBUTING.md", "CHANGELOG.md")
OUTSIDE = re.compile(r"\]\(((?:\.\./)+)(results|scenarios|simulations|CONTRIBUTING\.md|CHANGELOG\.md)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the repository that pages link to, each at its path there."""
    for pattern in SHIPPED:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Insert what is made from the code, and rewrite links out of docs/ to the site's paths of those files."""

    def part(match: re.Match[str]) -> str:
        if match[1] not in made.PARTS:
            raise PluginError(f"{page.file.src_path}: {match[0]} must name one of {', '.join(made.PARTS)}")
        return made.PARTS[match[1]]()

    text = made.MARK.sub(part, markdown)
    return OUTSIDE.sub(lambda link: f"]({link[1].removeprefix('../')}{link[2]}", text)
