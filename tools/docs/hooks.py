"""Hooks that mkdocs calls while it builds the site: parts of pages that are made from the code, and linked files."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # mkdocs loads this file by its path
from tools.docs import made, notebooks, site_links  # noqa: E402

SHIM = "javascripts/search-from-disk.js"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the repository that pages link to, each at its path there, and a page for each notebook."""
    for path in site_links.shipped():
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    for path in notebooks.NOTEBOOKS:
        page = notebooks.markdown(notebooks.read(path), path.name)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to the paths that files have on the site, and insert what is made from the code."""

    def part(match: re.Match[str]) -> str:
        if match[1] not in made.PARTS:
            raise PluginError(f"{page.file.src_path}: {match[0]} must name one of {', '.join(made.PARTS)}")
        return made.PARTS[match[1]]()

    # What is made links to pages of the site, and a page made from a notebook stands beside it.
    name = page.file.src_uri
    if not (ROOT / name).is_file():
        name = f"docs/{name}"
    return made.MARK.sub(part, site_links.rewritten(markdown, name))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Load the script by which search works from disk out of the site itself, not from a server."""
    return _shim_of_ours(output, get_relative_url(SHIM, page.url))


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """Do the same in pages without a source, as that of a wrong address."""
    return _shim_of_ours(output_content, f"/{SHIM}")


def _shim_of_ours(output: str, path: str) -> str:
    return output.replace("https://unpkg.com/iframe-worker/shim", path)
