"""The pictures of the gallery: `python -m tools.docs.gallery NAME...` runs one, keeps its numbers, and draws it.

Numbers lie in `docs/gallery/NAME.json` and the picture beside them; `--draw` draws all again from their numbers, and
runs nothing. Each line is a mean over three seeds, with its standard deviation, if it comes from runs.
"""

from __future__ import annotations

import csv
import json
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

import flower_privdec as fp
from flower_privdec.reporting.look import (
    add_legend,
    in_percent,
    log_scale,
    new_axes,
    new_figure,
    plot_curve,
    plot_spread,
    set_title,
)
from flower_privdec.reporting.plots import save_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "gallery"
ADAPTERS = ROOT / "simulations" / "adapters"
APP = ROOT / "simulations" / "adapted-quickstart-sklearn" / "before"
SEEDS = (1, 2, 3)
Line = dict[str, list[float]]  # x, mean and, if it comes from several runs, std
Lines = dict[str, Line]
Numbers = dict[str, Any]  # title, x and y (the axes), share, and the lines by label


def over_seeds(x: Sequence[float], runs: Sequence[Sequence[float]]) -> Line:
    """Return a line of means and standard deviations over runs."""
    columns = list(zip(*runs, strict=True))
    means = [round(statistics.mean(column), 5) for column in columns]
    deviations = [round(statistics.stdev(column), 5) for column in columns]
    return {"x": list(x), "mean": means, "std": deviations}


def accuracy_by_round(scenario: fp.Scenario, which: str = "peer_mean") -> tuple[list[float], list[float]]:
    """Run a scenario, and return its rounds and an accuracy at each."""
    metrics = fp.run(scenario).metrics
    return [line["round"] for line in metrics], [line["accuracy"][which] for line in metrics]


def lines_of(scenarios: Mapping[str, Mapping[str, Any]], base: Mapping[str, Any], which: str = "peer_mean") -> Lines:
    """Return a line for each of some scenarios that differ from a base in some sections."""
    lines = {}
    for label, changed in scenarios.items():
        runs = [accuracy_by_round(fp.make_scenario(**{**base, **changed, "seed": seed}), which) for seed in SEEDS]
        lines[label] = over_seeds(runs[0][0], [values for _, values in runs])
    return lines


def together_or_alone(base: Mapping[str, Any], rate: float) -> Lines:
    """Return the lines of peers that share a model, and of the same peers each alone, at the same ε."""
    alone = {"algorithm": {"name": "local", "learning_rate": rate}}
    return lines_of({"peers that share a model": {}, "each alone": alone}, base)


def own_data() -> Numbers:
    """Arrays of one's own in an .npz file, as in the tutorial."""
    draws = np.random.default_rng(0)
    x = draws.normal(size=(2_000, 6)).astype(np.float32)
    y = (x[:, 0] * x[:, 1] > 0).astype(np.int64)
    np.savez("visits.npz", x_train=x[:1_600], y_train=y[:1_600], x_test=x[1_600:], y_test=y[1_600:])
    base = {
        "name": "visits",
        "n_peers": 8,
        "rounds": 60,
        "data": {"dataset": "npz", "root": "visits.npz", "batch": {"rate": 0.2}},
        "model": {"name": "mlp", "hidden": [32]},
        "algorithm": {"name": "privsgp", "learning_rate": 1.0},
        "topology": {"name": "complete"},
        "privacy": {"epsilon": 8.0, "delta": 1e-3},
        "evaluation": {"every": 6},
    }
    return by_round("Your own arrays, 8 peers, ε = 8", together_or_alone(base, 1.0))


def write_hospital(name: str, rows: int, columns: Sequence[str]) -> None:
    """Write the table of a hospital: illness follows from age and pressure; one age in ten is missing."""
    with open(name, "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(columns)
        for _ in range(rows):
            age = random.gauss(60, 12)
            pressure = random.gauss(130, 15)
            is_ill = age + pressure + random.gauss(0, 10) > 190
            row = {
                "age": f"{age:.0f}" if random.random() < 0.9 else "",
                "pressure": f"{pressure:.0f}",
                "ward": random.choice("ABC"),
                "outcome": "ill" if is_ill else "well",
            }
            table.writerow([row[column] for column in columns])


def hospitals() -> Numbers:
    """Tables of three hospitals, one of which lacks a column."""
    random.seed(1)
    write_hospital("hospital-0.csv", 300, ("age", "pressure", "ward", "outcome"))
    write_hospital("hospital-1.csv", 200, ("age", "ward", "outcome"))
    write_hospital("hospital-2.csv", 250, ("outcome", "ward", "pressure", "age"))
    write_hospital("public.csv", 1000, ("age", "pressure", "ward", "outcome"))
    table = {
        "target": "outcome",
        "numbers": {"age": [60, 12], "pressure": [130, 15]},
        "categories": {"ward": ["A", "B", "C"]},
        "missing": "flag",
    }
    base = {
        "name": "hospitals",
        "n_peers": 3,
        "rounds": 40,
        "data": {
            "dataset": "csv",
            "root": "hospital-{peer}.csv",
            "test": "public.csv",
            "labels": ["well", "ill"],
            "table": table,
            "batch": {"rate": 0.2},
        },
        "model": {"name": "linear"},
        "algorithm": {"name": "privsgp", "learning_rate": 1.0},
        "topology": {"name": "complete"},
        "privacy": {"epsilon": 1.0, "delta": 1e-4},
        "evaluation": {"every": 4},
    }
    return by_round("Tables of three hospitals, ε = 1", together_or_alone(base, 1.0))


def images() -> Numbers:
    """Digits as a folder of PNG files for each class."""
    from PIL import Image
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    for number, (values, label) in enumerate(zip(pixels, labels, strict=True)):
        part = "test" if number % 5 == 0 else "train"
        folder = Path("digits") / part / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((values.reshape(8, 8) * 15.9).astype(np.uint8)).save(folder / f"{number}.png")
    base = {
        "name": "images",
        "n_peers": 8,
        "rounds": 60,
        "data": {
            "dataset": "image-folder",
            "root": "digits/train",
            "test": "digits/test",
            "labels": [str(digit) for digit in range(10)],
            "batch": {"rate": 0.2},
        },
        "model": {"name": "softmax"},
        "algorithm": {"name": "privsgp", "learning_rate": 0.5},
        "topology": {"name": "complete"},
        "privacy": {"epsilon": 3.0, "delta": 1e-3},
        "evaluation": {"every": 6},
    }
    return by_round("A folder of images, 8 peers, ε = 3", together_or_alone(base, 0.5))


def lora() -> Numbers:
    """A pretrained transformer, fine-tuned by LoRA and in full (`simulations/adapters`), by bytes sent."""
    lines = {}
    with importing_from(ADAPTERS):
        from transformer import WEIGHTS, pretrain  # type: ignore[import-not-found]

        if not WEIGHTS.exists():
            pretrain()
        for label, name, rate in (("LoRA of rank 4", "lora", 1.0), ("in full", "full", 0.5)):
            runs = []
            megabytes = []
            for seed in SEEDS:
                changed = {"model.module": f"transformer:{name}", "algorithm.learning_rate": rate, "seed": seed}
                result = fp.run(fp.load_scenario(ADAPTERS / "scenario.yaml", changed, evaluation={"every": 4}))
                a_round = result.summary["traffic"]["bytes"]
                megabytes = [round(line["round"] * a_round / 1e6, 4) for line in result.metrics]
                runs.append([line["accuracy"]["mean_model"] for line in result.metrics])
            lines[label] = over_seeds(megabytes, runs)
    return {
        "title": "Fine-tuning a transformer, 8 peers, ε = 8",
        "x": "MB sent by a peer",
        "y": "accuracy",
        "share": True,
        "log": True,
        "lines": lines,
    }


def liars() -> Numbers:
    """One peer of eight sends minus the others' mean: believed, judged, and nobody lying."""
    base = {
        "name": "liars",
        "n_peers": 8,
        "rounds": 60,
        "data": {"dataset": "digits", "batch": {"size": 20}},
        "model": {"name": "softmax"},
        "algorithm": {"name": "privsgp", "learning_rate": 0.5},
        "topology": {"name": "complete"},
        "privacy": {"epsilon": 3.0, "delta": 1e-3},
        "evaluation": {"every": 6},
    }
    attack = {"kind": "minus-mean", "peers": [7]}
    judged = {"robust": {"kind": "clipped", "byzantine": 1}}
    scenarios: dict[str, dict[str, Any]] = {
        "nobody lies": {},
        "one of 8 lies, and is judged": {"attack": attack, "network": judged},
        "one of 8 lies, and is believed": {"attack": attack},
    }
    numbers = by_round("One liar among 8 peers, digits, ε = 3", lines_of(scenarios, base, "peer_max"))
    return numbers | {"y": "accuracy, best peer"}


def who_learns_what() -> Numbers:
    """What peers that collude learn of another one, at most: a plan, without any run."""
    scenario = fp.load_scenario("digits")
    cancelling = fp.make_scenario(
        scenario, {"privacy.noise": {"kind": "cancelling", "colluding": 2}}, name="cancelling"
    )
    by_colluders = fp.who_learns_what(cancelling).by_colluders
    colluders = [int(count) for count in by_colluders]
    each = fp.who_learns_what(scenario).observers[0]["epsilon"][1]
    lines = {
        "noise that cancels, colluding: 2": {
            "x": colluders,
            "mean": [round(value, 4) for value in by_colluders.values()],
        },
        "each for itself": {"x": colluders, "mean": [round(each, 4)] * len(colluders)},
    }
    return {
        "title": "What others learn of one of 8 peers, at most",
        "x": "peers that collude (0: an outsider)",
        "y": "ε towards them",
        "share": False,
        "lines": lines,
    }


def flower_app() -> Numbers:
    """A Flower app of scikit-learn, with FedAvg and after the four lines (`simulations/adapted-quickstart-sklearn`)."""
    from flwr.app import ArrayRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp.strategy import FedAvg

    from flower_privdec.flower import LocalGrid, PeerMod, PushSum

    config: dict[str, bool | float | int | str] = {"num-server-rounds": 20, "local-epochs": 1, "penalty": 0.001}
    lines: dict[str, Line] = {}
    with importing_from(APP):
        from sklearn_digits import client_app, server_app  # type: ignore[import-not-found]

        def app_with(mods: list[Any]) -> ClientApp:
            app = ClientApp(mods=mods)
            app.train()(client_app.train)
            app.evaluate()(client_app.evaluate)
            return app

        def accuracies(mods: list[Any], strategy: Any) -> list[float]:
            """Return the accuracy of the mean model after each round."""
            arrays = ArrayRecord(server_app.get_params(server_app.make_model(1, 0.001)))
            grid = LocalGrid(app_with(mods), 8, run_config=config)
            result = strategy.start(grid, arrays, num_rounds=20, evaluate_fn=server_app.evaluate)
            return [float(result.evaluate_metrics_serverapp[k]["accuracy"]) for k in range(1, 21)]

        # What is drawn by chance is only the noise.
        rounds = [float(k) for k in range(1, 21)]
        lines["FedAvg"] = {"x": rounds, "mean": accuracies([], FedAvg(fraction_evaluate=0.0))}
        plain = accuracies([PeerMod()], PushSum(fraction_evaluate=0.0))
        lines["PushSum and PeerMod(), no noise"] = {"x": rounds, "mean": plain}
        private = PeerMod(clip_norm=0.5, epsilon=50.0, delta=0.01)
        noised = [accuracies([private], PushSum(fraction_evaluate=0.0)) for _ in SEEDS]
        lines["PeerMod(clip_norm=0.5, epsilon=50.0)"] = over_seeds(rounds, noised)
    return by_round("A Flower app, before and after four lines", lines)


def by_round(title: str, lines: Lines) -> Numbers:
    """Return the numbers of a picture of accuracy over the rounds."""
    return {"title": title, "x": "round", "y": "accuracy", "share": True, "lines": lines}


@contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """Import modules from a folder meanwhile."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


STORIES: dict[str, Callable[[], Numbers]] = {
    "own-data": own_data,
    "hospitals": hospitals,
    "images": images,
    "lora": lora,
    "liars": liars,
    "who-learns-what": who_learns_what,
    "flower-app": flower_app,
}


def draw(numbers: Numbers) -> Figure:
    """Draw the lines of a picture; call it within `drawing`."""
    figure = new_figure(6.0, 3.2)
    axes = new_axes(figure)[0, 0]
    lines = numbers["lines"]
    factor = 100 if numbers["share"] else 1
    for index, (label, line) in enumerate(lines.items()):
        mean = factor * np.array(line["mean"])
        plot_curve(axes, line["x"], mean, index, of=len(lines), label=label)
        if "std" in line:
            deviation = factor * np.array(line["std"])
            plot_spread(axes, np.array(line["x"]), mean - deviation, mean + deviation, index, of=len(lines))

    has_spread = any("std" in line for line in lines.values())
    set_title(axes, numbers["title"], "bands: standard deviation of three seeds" if has_spread else "")
    axes.set_xlabel(numbers["x"])
    axes.set_ylabel(numbers["y"])
    axes.margins(x=0.02)
    if numbers.get("log"):
        log_scale(axes, along="x")
    if numbers["share"]:
        in_percent(axes)
    else:
        axes.set_ylim(bottom=0)
    add_legend(figure, below=True)
    return figure


def save(name: str, folder: Path = PICTURES) -> Path:
    """Draw a picture from its numbers into a folder."""
    numbers = json.loads((PICTURES / f"{name}.json").read_text(encoding="utf-8"))
    path = folder / f"{name}.svg"
    save_picture(lambda: draw(numbers), path, "name")
    return path


def run(name: str) -> None:
    """Run what a picture shows, in a folder of its own, and keep its numbers."""
    with TemporaryDirectory() as folder, chdir(folder):
        numbers = STORIES[name]()
    (PICTURES / f"{name}.json").write_text(json.dumps(numbers, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(words: Sequence[str]) -> None:
    """Run and draw the named pictures, or draw all from their numbers."""
    if list(words) == ["--draw"]:
        names = list(STORIES)
    else:
        names = list(words)
        unknown = [name for name in names if name not in STORIES]
        if unknown or not names:
            sys.exit(f"error: {' '.join(unknown) or 'no name'}: must be --draw or some of {', '.join(STORIES)}")
        for name in names:
            run(name)
    for name in names:
        print(save(name).relative_to(ROOT))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1:])
