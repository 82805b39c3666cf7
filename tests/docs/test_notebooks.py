"""The notebooks run from top to bottom, and what their text says of the results is so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pages import LINK

from tools.docs.notebooks import FOLDER, NOTEBOOKS, executed, markdown, read

LARGEST = 150_000  # bytes of a notebook's file
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@every_notebook
def test_a_notebook_is_a_valid_one(path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(json.loads(path.read_text(encoding="utf-8")))


def results(name: str, folder: Path, **expressions: str) -> tuple[str, dict[str, Any]]:
    """Run a notebook; return what its cells showed as text, and the values of expressions over its variables."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("pandas")
    pairs = ", ".join(f"{key!r}: {text}" for key, text in expressions.items())
    notebook = executed(FOLDER / f"{name}.ipynb", folder, f"import json\nprint(json.dumps({{{pairs}}}))")
    values: dict[str, Any] = json.loads(notebook.cells.pop().outputs[0].text)
    return markdown(notebook, name), values


@pytest.mark.slow
def test_the_first_run_is_as_its_text_says(tmp_path: Path) -> None:
    shown, values = results(
        "first-private-run",
        tmp_path,
        epsilons="[plan.epsilon] + [peer['epsilon'] for peer in result.privacy]",
        accuracy="result.summary['accuracy']",
        right="sum(guess == digit for digit, guess in enumerate(guesses))",
        means="{row['label']: row['accuracy']['mean'] for row in table.rows}",
        ledgers="fp.ledger('ledgers', 1e-3)",
    )
    assert max(values["epsilons"]) <= 3
    assert values["accuracy"]["mean_model"] > 0.75
    assert values["accuracy"]["peer_min"] > values["means"]["each alone"]
    assert values["right"] >= 6
    assert values["means"]["together"] > values["means"]["each alone"] + 0.1
    assert values["means"]["together, no privacy"] > values["means"]["together"]

    # The run that is refused takes no step.
    (ledger,) = values["ledgers"]
    assert len(ledger["runs"]) == 1
    assert "allows this run no step" in shown


@pytest.mark.slow
def test_own_data_and_model_are_as_their_text_says(tmp_path: Path) -> None:
    shown, values = results(
        "own-data-and-model",
        tmp_path,
        epsilons="[peer['epsilon'] for peer in result.privacy]",
        accuracy="result.summary['accuracy']['mean_model']",
        most_frequent="float(public['back'].value_counts(normalize=True).max())",
        chances="patients['chance'].tolist()",
    )
    assert "trains BatchNorm1d" in shown
    assert "data.table.categories.ward does not list" in shown
    assert "draws other numbers" in shown
    assert "2,400 rows" in shown
    assert len(values["epsilons"]) == 4
    assert max(values["epsilons"]) <= 2
    assert values["accuracy"] > 0.75
    assert values["most_frequent"] < 0.56
    assert values["chances"][0] > 0.5 > values["chances"][1]


@pytest.mark.slow
def test_who_learns_what_is_as_its_text_says(tmp_path: Path) -> None:
    _, values = results(
        "who-learns-what",
        tmp_path,
        alone="[row['epsilon'] for row in alone.observers]",
        hops="[row['hops'] for row in alone.facts['by_distance']]",
        towards="{row['observer']: row['epsilon'][1] for row in together.observers}",
        by_colluders="list(together.by_colluders.values())",
        means="{row['label']: row['accuracy']['mean'] for row in table.rows}",
        holds="audit.holds",
        proved="audit.groups[0].replica_lower_bound",
        canaries="audit.groups[0].canary_lower_bound",
        trials="[audit.groups[0].trials, audit.groups[0].replica_trials]",
    )
    # Noise of one's own: the same towards everybody.
    assert len({tuple(epsilon) for epsilon in values["alone"]}) == 1
    assert values["hops"] == [1, 2, 3]
    epsilon = values["alone"][0][1]
    assert 0.99 < epsilon <= 1

    # Noise that cancels: it grows with the coalition, and passes the other after two.
    by_colluders = values["by_colluders"]
    assert len(by_colluders) == 8
    assert by_colluders == sorted(by_colluders)
    assert by_colluders[1] < epsilon < by_colluders[3]
    assert by_colluders[2] == pytest.approx(epsilon, rel=0.01)
    assert values["towards"]["up to 2 other peers, relays and servers together"] <= 1
    assert 2 < values["towards"]["all other peers together"] < 5
    assert values["means"]["cancelling"] > values["means"]["each for itself"] + 0.03

    assert values["holds"]
    assert 0.4 < values["proved"] < epsilon
    assert values["canaries"] == 0
    assert values["trials"] == [8, 40_000]


@every_notebook
def test_stored_notebooks_have_run_and_are_tidy(path: Path) -> None:
    notebook = read(path)
    assert path.stat().st_size < LARGEST
    for number, cell in enumerate(notebook.cells):
        assert cell.id == f"cell-{number}"
        if cell.cell_type == "code":
            assert cell.execution_count is not None
            assert not any(output.output_type == "error" for output in cell.outputs)
    text = path.read_text(encoding="utf-8")
    assert "text/html" not in text
    assert not re.search(r'"[^"]*/(home|root|tmp|work)/', text)


@every_notebook
def test_a_notebooks_links_lead_somewhere(path: Path) -> None:
    for target in LINK.findall(markdown(read(path), path.name)):
        if not target.startswith("data:"):
            assert (path.parent / target).is_file(), f"{target} is not there"


@every_notebook
def test_a_notebook_is_a_page_of_the_site(path: Path) -> None:
    page = markdown(read(path), path.name)
    title, _, rest = page.partition("\n\n")
    assert title.startswith("# ")
    assert rest.startswith(f'<a href="{path.name}" download>')
    assert "](data:image/png;base64," in page
