"""Links on the site: each leads to a page or a file that the site has, also from pages outside docs/."""

from __future__ import annotations

import posixpath

import pytest
from pages import DOCS, ROOT

from tools.docs.notebooks import NOTEBOOKS
from tools.docs.site_links import place_on_site, rewritten, shipped, targets


def test_every_link_of_the_site_leads_to_the_site() -> None:
    files = [*shipped(), *(path for path in (ROOT / "docs").rglob("*") if path.is_file()), *NOTEBOOKS]
    there = {place_on_site(path.relative_to(ROOT).as_posix()) for path in files}
    pages = [*DOCS, *(path for path in shipped() if path.suffix == ".md")]
    assert len(pages) > 70
    for page in pages:
        text = page.read_text(encoding="utf-8")
        path = page.relative_to(ROOT).as_posix()
        wanted = {place_on_site(target) for target in targets(text, path)}
        assert wanted <= there, f"{path}: the site lacks {sorted(wanted - there)}"

        # A link that was rewritten leads from the page's place on the site to the place of its file.
        folder = posixpath.dirname(place_on_site(path))
        found = targets(rewritten(text, path), posixpath.join(folder, "page.md"))
        assert set(found) == wanted, path


@pytest.mark.parametrize(
    ("path", "link", "wanted"),
    [
        ("CHANGELOG.md", "docs/how-to/own.md#a-graph", "how-to/own.md#a-graph"),
        ("docs/how-to/own.md", "../../simulations/shapes/README.md", "../simulations/shapes/README.md"),
        ("simulations/shapes/README.md", "../../docs/studies.md", "../../studies.md"),
        ("docs/index.md", "notebooks/first-private-run.ipynb", "notebooks/first-private-run.md"),
        ("docs/index.md", "#below", "#below"),
        ("docs/index.md", "https://flower.ai/docs/", "https://flower.ai/docs/"),
    ],
)
def test_a_link_is_rewritten_to_the_sites_path(path: str, link: str, wanted: str) -> None:
    assert rewritten(f"[a word]({link})", path) == f"[a word]({wanted})"


def test_code_that_looks_like_a_link_stays() -> None:
    code = "```python\ny = layers[0](docs)\n```\nand `layers[1](docs/a.md)`"
    assert rewritten(code, "docs/how-to/own.md") == code
