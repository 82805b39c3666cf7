"""Run the notebooks of docs/notebooks again: `python -m tools.docs.notebooks [NAME ...]` writes what their cells show.

The site has a page for each, made from the same file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SECONDS = 600  # for a cell; only a cell that hangs takes as long


def read(path: Path) -> nbformat.NotebookNode:
    """Read a notebook's file."""
    notebook: nbformat.NotebookNode = nbformat.read(path, as_version=4)
    return notebook


def executed(path: Path, folder: Path, *more: str) -> nbformat.NotebookNode:
    """Run a notebook's cells in a kernel of their own.

    Args:
        folder: in which the kernel runs; its cells may write there.
        more: code of further cells, which run after the notebook's.

    Returns:
        The notebook with what its cells showed, and with these cells at its end.

    Raises:
        CellExecutionError: a cell fails.
    """
    from nbclient import NotebookClient
    from traitlets.config import Config

    notebook = read(path)
    notebook.cells += [nbformat.v4.new_code_cell(text) for text in more]
    # Messages to the kernel go over sockets in its folder, not over ports that others could open.
    config = Config({"KernelManager": {"transport": "ipc", "ip": str(folder / "kernel")}})
    client = NotebookClient(notebook, config=config, kernel_name="python3", timeout=SECONDS, startup_timeout=SECONDS)
    client.resources = {"metadata": {"path": str(folder)}}
    client.execute()
    return notebook


def tidy(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Leave of what the cells show only text and pictures, and nothing that differs from run to run by itself."""
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = {}
        for output in cell.get("outputs", ()):
            if "metadata" in output:  # text that was printed has none
                output.metadata = {}
            shown = output.get("data", {})
            # The HTML of a result holds its picture a second time, and a style sheet that sites take out.
            shown.pop("text/html", None)
            if "image/png" in shown:
                shown.pop("text/plain", None)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def markdown(notebook: nbformat.NotebookNode, name: str) -> str:
    """Return a notebook as a page of the site: text as it is, code and what it shows in blocks, pictures inline.

    Args:
        name: of its file, to which the page links.
    """
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue

        parts.append(f"```python\n{cell.source}\n```")
        parts += [_block(output) for output in cell.outputs]

    # The page's title is the first line of the first cell.
    title, _, text = parts[0].partition("\n")
    download = f'<a href="{name}" download>The notebook</a>, to download and run.'
    parts[0] = f"{title}\n\n{download}\n{text}"
    return "\n\n".join(parts) + "\n"


def _block(output: Any) -> str:
    """Return what a cell showed as Markdown."""
    shown = output.get("data", {})
    if "image/png" in shown:
        encoded = shown["image/png"].replace("\n", "")
        return f"![](data:image/png;base64,{encoded})"
    text = output.get("text") or shown.get("text/plain", "")
    return f"```text\n{text.rstrip()}\n```"


def main(names: Sequence[str]) -> None:
    """Run the notebooks with these names, or all of them, and write them with what their cells show."""
    paths = [FOLDER / f"{name.removesuffix('.ipynb')}.ipynb" for name in names] or NOTEBOOKS
    for path in paths:
        with TemporaryDirectory() as folder:
            notebook = executed(path, Path(folder))
            text = nbformat.writes(tidy(notebook)).replace(f"{folder}/", "")
        path.write_text(text + "\n", encoding="utf-8")
        print(f"{path.name}: {len(notebook.cells)} cells, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
