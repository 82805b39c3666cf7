"""What ε means for those who are in the data of a run: the page that a data protection officer reads.

Its figures come from the run's summary and ledger (`evidence`); each is an upper bound, rounded away from comfort. The
page says, in this order: what is protected, how strongly, towards which observers, for how long, what is assumed, and
what is not covered. Each of these is a function here that returns a `Topic`, with its sentences in reading order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flower_privdec import __version__
from flower_privdec.common.formatting import epsilon_text, peer_ranges, setting
from flower_privdec.privacy.accountant.accounting import epsilon_of_runs
from flower_privdec.privacy.ledger.segments import Entry
from flower_privdec.privacy.ledger.spending import costs_in
from flower_privdec.privacy.mechanism.events import Adversary
from flower_privdec.reporting import wording
from flower_privdec.reporting.evidence import SAME, Evidence, Payments, is_protected
from flower_privdec.reporting.run_folder import Result, RunGroup
from flower_privdec.reporting.wording import at_most

FALSE_POSITIVE_RATES = (0.001, 0.01, 0.05, 0.25)
EXAMPLES_OF_ONE_PERSON = (1, 2, 5)
GUIDE = "docs/data-protection.md"

EVERY_MESSAGE = "anyone who sees every message and every model"
# What each ε of a summary's row is against, strongest first.
OBSERVERS = {
    "epsilon_if_all_collude": f"{EVERY_MESSAGE}, and all other peers together",
    "epsilon": f"{EVERY_MESSAGE}, and all other peers together",
    "epsilon_of_replies_to_one": "one neighbour, by the replies to it only; it also hears the other messages, so this "
    "is not a bound on all that it learns",
}


@dataclass(frozen=True)
class Table:
    """A table of texts."""

    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class Topic:
    """A heading, and what stands below it: a text is a paragraph, a list has points."""

    title: str
    blocks: list[str | list[str] | Table]


@dataclass(frozen=True)
class Notice:
    """The page about one run, or about runs that differ only in their seeds.

    Attributes:
        label: the name of the run or runs.
        short: the page in a few sentences.
    """

    label: str
    short: list[str]
    topics: list[Topic]


# --- numbers as text: always an upper bound ---


def at_least(chance: float) -> str:
    """Return a chance in percent, rounded down."""
    return f"{max(0.0, math.floor(1000 * chance + 1e-9) / 10):.1f} %"


def verdict(right: float) -> str:
    """Return what a bound on right guesses comes to: a sentence that neither frightens nor comforts without reason."""
    if right <= 0.55:
        return "That is hardly better than tossing a coin."
    if right <= 0.75:
        return "That is better than tossing a coin, and wrong at least once in four times."
    if right <= 0.95:
        return "That leaves doubt about any one example; it does not hide it."
    if right <= 0.99:
        return (
            "That leaves little doubt about an example if such a test exists; it is only proved that no test does "
            "better."
        )

    return (
        "That rules out next to nothing. It does not mean that such a test exists, only that nothing better is proved: "
        "do not rely on this figure; train with a smaller ε."
    )


# --- the page ---


def notice(group: RunGroup) -> Notice:
    """Return the page about a group's runs: about the one that protects least, and all of them together."""
    run, evidence = _least_protected(group)
    if not is_protected(evidence.rows):
        return _unprotected(group, run, evidence)

    right = evidence.right_guesses()
    topics = [
        _protected(run, evidence),
        _strength(evidence, right),
        _observers(run, evidence),
        _duration(group, run, evidence),
        _assumptions(run),
        _not_covered(run),
        _several_examples(evidence),
        _record(group, evidence),
    ]
    return Notice(group.label, _short(run, evidence, right), [topic for topic in topics if topic.blocks])


def notice_in_short(group: RunGroup) -> list[str]:
    """Return the page about a group's runs in a few sentences, without the figures of its topics, which take long."""
    run, evidence = _least_protected(group)
    if not is_protected(evidence.rows):
        return _unprotected(group, run, evidence).short
    return _short(run, evidence, evidence.right_guesses())


def _least_protected(group: RunGroup) -> tuple[Result, Evidence]:
    """Return the run of a group that protects least, and what is known of it."""
    all_evidence = [(run, Evidence.of(run)) for run in group.runs]
    return max(all_evidence, key=lambda pair: pair[1].epsilon)


def _unit(rows: Sequence[dict[str, Any]]) -> str:
    return "peer's data" if rows and rows[0].get("unit") == "peer" else "example"


def _may_be_published(run: Result) -> bool | None:
    """Return whether a run's figures hold for anyone who sees its models; None if that is not known."""
    publishable: bool | None = run.summary.get("publishable")
    return publishable


def _short(run: Result, evidence: Evidence, right: float) -> list[str]:
    unit = _unit(evidence.rows)
    colluding = _colluding(evidence.rows)
    if colluding is None:
        helpers = "with the help of all other peers"
    elif colluding == 0:
        helpers = "without the help of any peer"
    else:
        helpers = f"with the help of at most {colluding} other peers"
    short = [
        f"Suppose someone wants to know whether one given {unit} was used in this training. They see every message and "
        f"every model, {helpers}, and know all other data. However they test it, they are right at most "
        f"{at_most(right)} of the time if the {unit} is in the data by the toss of a coin; guessing is right 50 % of "
        f"the time. {verdict(right)}"
    ]
    if any("epsilon_if_all_collude" in row for row in evidence.rows):
        by_all = evidence.towards("epsilon_if_all_collude").right_guesses()
        short.append(f"If all other peers help, they are right at most {at_most(by_all)} of the time.")

    if not run.finished:
        short.append("The run is not finished. The figures are of what it has spent so far, and will grow.")
    published = _may_be_published(run)
    if published is False:
        short.append(
            "Nothing of this run may be published under these figures: its noise is drawn from keys, so that the run "
            "can be repeated, and anyone who knows the data can draw it again and take it off. They are the figures "
            "that the same training has with noise of the operating system (compute.generator: system, or real peers)."
        )
    elif published is None:
        short.append("The run does not say where its noise came from. Do not publish its models before you know.")
    if evidence.problem is not None:
        short.append(evidence.problem)
    return short


def _protected(run: Result, evidence: Evidence) -> Topic:
    summary = run.summary
    whose = f"{summary['n_peers']} peers"
    if len(evidence.rows) == 1 and summary["n_peers"] > 1 and summary["privacy"]:
        whose = f"peer {evidence.rows[0]['peer']}, one of {whose}"
    peers = (
        f"The data of {whose} (devices or sites that keep their data and train together): each "
        "peer's examples are protected from everybody else, the other peers included. They never leave the peer. What "
        "leaves is sums of what many examples would change in the model, each cut to one size, with random noise "
        "added."
    )

    if _unit(evidence.rows) == "peer's data":
        unit = "Protected is all of a peer's data at once: whether they were used at all, whatever they are."
    else:
        unit = (
            "Protected is one example: one row, image or text of one peer. What leaves could also have come from a "
            "training without that example, and how much that differs is bounded. So what can be learned about the "
            "example is bounded too, be it whether it is there or what it says. A person with several examples is "
            "protected less; see below."
        )

    return Topic(
        "What is protected, and whose",
        [peers, unit, "How many examples a peer has is not protected, nor are the members' names and addresses."],
    )


def _strength(evidence: Evidence, right: float) -> Topic:
    unit = _unit(evidence.rows)
    rows = []
    for rate in FALSE_POSITIVE_RATES:
        by_guessing = f"{100 * rate:g}"
        by_a_test = at_most(evidence.true_positive_rate(rate)).removesuffix(" %")
        rows.append((by_guessing, by_a_test, by_guessing))

    table = Table(
        ("wrongly named, of 100 not in the data", "rightly named, of 100 in the data, at most", "by guessing"), rows
    )
    if evidence.payments:
        basis = (
            "These bounds are computed from all that the ledger says was released. They hold for every test, known or "
            "not yet known, with any computing power."
        )
    else:
        basis = (
            "These bounds follow only from ε and δ, as the ledger is not at hand. They hold for every test; with the "
            "ledger they are often much lower."
        )

    return Topic(
        "How strongly",
        [
            "A test names those that it takes to be in the data. The more it names wrongly, the more it may also find:",
            table,
            basis,
            f"If every second {unit} that is tested is in the data, a test is wrong at least {at_least(1 - right)} of "
            "the time. Attacks that were tried in practice are usually wrong much more often, which is no promise.",
        ],
    )


def _observers(run: Result, evidence: Evidence) -> Topic:
    rows: list[tuple[str, ...]] = []
    for key, observer in OBSERVERS.items():
        values = [row for row in evidence.rows if key in row]
        if not values:
            continue
        against = evidence
        if key == "epsilon":
            observer = _main_observer(values)
        else:
            against = evidence.towards(key)
        rows.append((observer, epsilon_text(against.epsilon), at_most(against.right_guesses())))

    blocks: list[str | list[str] | Table] = [
        Table(("who looks", "ε", "right at most"), rows),
        "Anyone who sees less, such as only the final model, can do no more. From the peer that holds them nothing is "
        "hidden.",
    ]
    unequal = wording.alike(evidence.rows, lambda row: (epsilon_text(row["epsilon"]), setting(row["delta"])))
    if len(unequal) > 1:
        blocks += [
            "Peers are protected unequally; all figures above are of those with the largest ε.",
            Table(("peers", "ε", "δ"), list(unequal)),
        ]
    return Topic("Towards which observers", blocks)


def _colluding(rows: Sequence[dict[str, Any]]) -> int | None:
    """Return how many peers may help the observer for the first ε to hold; None for all."""
    return next((row["colluding"] for row in rows if row.get("colluding") is not None), None)


def _main_observer(rows: Sequence[dict[str, Any]]) -> str:
    colluding = _colluding(rows)
    if colluding is None:
        return OBSERVERS["epsilon"]
    if colluding == 0:
        return f"{EVERY_MESSAGE}, and is neither a peer nor helped by one"
    return f"{EVERY_MESSAGE}, and up to {colluding} other peers together"


def _duration(group: RunGroup, run: Result, evidence: Evidence) -> Topic:
    points = [
        "For ever. What was released cannot be called back, and the figures never get better: not with time, not when "
        "models are deleted, not when a peer leaves."
    ]
    if evidence.payments:
        n_runs = max(len(one.run_ids) for one in evidence.payments)
        count = "1 run" if n_runs == 1 else f"{n_runs} runs"
        which = "the peers' own ledgers hold"
        if len(evidence.payments) == 1:
            which = "the ledger holds"
        points.append(f"The figures count all that {which} today: {count} over these data.")

    by_summary = max(float(row["epsilon"]) for row in evidence.rows)
    if evidence.epsilon > by_summary * (1 + SAME):
        points.append(
            f"That is more than this run had spent at its end, ε = {epsilon_text(by_summary)}: the ledger counts other "
            "runs too."
        )
    again = evidence.again()
    if again is not None:
        epsilon, chance = again
        points.append(
            f"As much training again on the same data, with new noise, would make it ε = {epsilon_text(epsilon)}, and "
            f"a test right at most {at_most(chance)} of the time."
        )
    left = _left(run, evidence)
    if left:
        points.append(left)

    if any(row.get("scope") == "this run alone" for row in evidence.rows):
        points.append(
            "This ledger counts this run only. Whatever else was ever trained or published from the same data adds to "
            "it, and is not in these figures: give all runs one ledger (privacy.ledger)."
        )
    if "budget_note" in run.summary:
        points.append(f"About the budget: {run.summary['budget_note']}.")
    if text := together([group]):
        points.append(text)
    return Topic("For how long", [points])


def _left(run: Result, evidence: Evidence) -> str | None:
    """Say what is left of the budget, at the peer with least left."""
    private = run.scenario.private
    if private is None:
        return None
    if private.epsilon is None:
        return "No budget was set: nothing stops further runs."
    if private.calibration == "paper":
        return None

    budgets = np.broadcast_to(np.asarray(private.epsilon, dtype=float), (run.scenario.n_peers,))
    grown = evidence.epsilon - max(float(row["epsilon"]) for row in evidence.rows)
    rest = min(float(budgets[row["peer"]]) - float(row["epsilon"]) for row in evidence.rows) - grown
    budget = setting(float(budgets.max()))
    if rest <= 0:
        return f"The budget of ε = {budget} is used up."
    return f"Of the budget of ε = {budget}, {math.floor(1000 * rest) / 1000:g} is left in this ledger."


def together(groups: Sequence[RunGroup]) -> str | None:
    """Say what runs cost together that were on the same data with a ledger each, or None if no two were.

    Ledgers are of the same data if they name the same source.
    """
    by_path: dict[Path, tuple[Payments, list[dict[str, Any]]]] = {}
    for group in groups:
        for run in group.runs:
            evidence = Evidence.of(run)
            if len(evidence.payments) == 1:  # ledgers of peers that ran by themselves are each of other data
                (one,) = evidence.payments
                by_path[one.path.resolve()] = one, evidence.rows

    sentences = []
    for source in sorted({one.source for one, _ in by_path.values()}):
        parts = [(one, rows) for one, rows in by_path.values() if one.source == source]

        # One run may have paid in several ledgers, copies of one another: the one that has most of it counts.
        runs: dict[str, list[Entry]] = {}
        for one, _ in parts:
            for run_id in one.run_ids:
                entries = entries_of(one, run_id)
                if steps_paid(entries) > steps_paid(runs.get(run_id, [])):
                    runs[run_id] = entries

        if len(parts) > 1 and len(runs) > 1:
            deltas = {float(row["delta"]) for _, rows in parts for row in rows}
            costs = costs_in([entry for entries in runs.values() for entry in entries], _strongest(parts))
            epsilon = max(epsilon_of_runs(costs, delta) for delta in deltas)
            sentences.append(
                f"The {len(runs)} runs on {source} of this page have {len(parts)} ledgers, each of which counts its "
                f"own runs only. To anyone who sees all of them they are one: together ε = {epsilon_text(epsilon)}."
            )
    return " ".join(sentences) or None


def entries_of(one: Payments, run: str) -> list[Entry]:
    """Return what a ledger holds of a run."""
    return [entry for entry in one.entries if entry.run.id == run]


def steps_paid(entries: Iterable[Entry]) -> int:
    """Return how many steps of its peers some entries pay for."""
    charges = [charge for entry in entries for charge in entry.charges]
    return sum(release.steps * len(charge.peers) for charge in charges for release in charge.releases)


def _strongest(parts: Sequence[tuple[Payments, Any]]) -> Adversary:
    """Return the strongest of some ledgers' adversaries."""
    numbers = [one.adversary.colluding for one, _ in parts]
    known = [number for number in numbers if number is not None]
    return Adversary(max(known) if len(known) == len(numbers) else None)


def _assumptions(run: Result) -> Topic:
    noise = "the run does not say where its noise came from."
    if "noise" in run.summary:
        noise = f"here it is {run.summary['noise']}."
    points = [
        "Each example was made from one person only. If an example was computed from others (a mean over all that was "
        "subtracted, a duplicate, a text that quotes another), what it shows of those is not counted.",
        "Peers run this program, unchanged, on the data that they mean to protect, and nothing else is released from "
        "those data.",
        f"Noise is what a good generator gives: {noise}",
        "The ledger is the one that the program wrote. Lines that were changed or removed from its middle are noticed; "
        "a folder put back from a backup is noticed only if a checkpoint or a neighbour has seen more of it.",
    ]
    colluding = _colluding(run.summary["privacy"])
    if colluding is not None:
        points.append(
            f"At most {colluding} peers share what they know. The issuer of the peers' certificates vouches that they "
            "are different parties: one party with several certificates is several colluders. The ε against all other "
            "peers needs neither."
        )
    if "hardened" not in str(run.summary.get("noise")):
        points.append(
            "Numbers are as good as real numbers: the last digits of sums and of noise are rounded, and what that "
            "could show is not counted (privacy.hardened counts it)."
        )

    claim = wording.claim(run.summary)
    if claim is not None:
        points.append(
            f"{claim[0].upper()}{claim[1:]}. The figures on this page are the accountant's and do not rely on it."
        )
    if "claim_note" in run.summary:
        points.append(f"About that claim: {run.summary['claim_note']}")
    if "started_from" in run.summary:
        points.append(
            f"The training began with the model of {run.summary['started_from']}, which is covered by its own ε."
        )
    proved = (
        "Proved, and held by tests against independent computations, is the step from what is released to these "
        "figures. Assumed, and to be ensured by those who run it, is:"
    )
    return Topic("What is assumed, and not proved", [proved, points])


def _not_covered(run: Result) -> Topic:
    points = [
        "What the model is for: it learns what is common to many examples. What holds for a group (who smokes falls "
        "ill more often) can be learned about its members, whether their data were used or not.",
        "Public data: the test set, and data that the training starts from, are taken to be public.",
        "Choices that people made by looking at private data, such as settings tuned in runs that share no ledger.",
        "The devices: an intruder on a peer reads its data, and its checkpoint, which keeps what never leaves it.",
        "Whether the data are right, lawfully held, or fit for the purpose, and whether the model is good or fair.",
        "How long a step takes, and other things that can be measured from outside.",
    ]
    if "evaluation_private" in run.summary:
        points.insert(
            0, f"Figures that this run published on the peers' own examples ({run.summary['evaluation_private']})."
        )
    return Topic("What is not covered", [points])


def _several_examples(evidence: Evidence) -> Topic:
    if _unit(evidence.rows) != "example":
        return Topic("If a person has several examples", [])

    rows = []
    for examples in EXAMPLES_OF_ONE_PERSON:
        epsilon, delta, chance = evidence.of_group(examples)
        rows.append((str(examples), epsilon_text(epsilon), setting(float(f"{delta:.2g}")), at_most(chance)))
    return Topic(
        "If a person has several examples",
        [
            "All examples of a person at one peer can be looked for at once. Their ε is at most this, and a test for "
            "whether they are there is right at most so often:",
            Table(("examples", "ε", "at δ", "right at most"), rows),
            "With many examples of one person the protection of that person ends. If the same person is at several "
            "peers, count the examples of all of them.",
        ],
    )


def _record(group: RunGroup, evidence: Evidence) -> Topic:
    deltas = sorted({float(row["delta"]) for row in evidence.rows})
    facts = [
        f"{wording.guarantee(group.summary)}. Formally: (ε, δ)-differential privacy, which bounds every outcome; the "
        "figures above are what follows for a test over all outcomes.",
        f"δ = {' / '.join(map(setting, deltas))} is the probability that ε leaves out; the figures above include it.",
    ]
    for one in evidence.payments:
        facts.append(f"Ledger: {one.path}, {one.lines:,} payments, verified; last line {one.head[:16]}.")
    for run in group.runs:
        facts.append(f"Run: {run.folder}")
    facts.append(f"Written by privdec {__version__}. What the words mean: {GUIDE}.")
    return Topic("For the record", [facts])


def _unprotected(group: RunGroup, run: Result, evidence: Evidence) -> Notice:
    """Return the page about a run that protects no one, or some peers' examples not at all."""
    if not evidence.rows:
        short = ["Nothing is known yet: the run has not been evaluated. Make this page again later."]
        return Notice(group.label, short, [])

    open_peers = [row["peer"] for row in evidence.rows if math.isinf(float(row["epsilon"]))]
    if len(open_peers) == len(evidence.rows):
        whose = "all peers"
    else:
        whose = f"peers {peer_ranges(open_peers)}"
    short = [
        f"There is no protection (ε = ∞) for the data of {whose}. Their examples stay where they are, but the messages "
        "and models of this training may reveal anything about them, up to whole examples.",
        "Treat messages and models as you treat the data themselves. To protect those in the data, train with a "
        "privacy section (privacy: {epsilon: 3, delta: 1e-5}); what was released by now cannot be protected later.",
    ]
    return Notice(group.label, short, [_not_covered(run)])


# --- as Markdown ---


def as_markdown(groups: Sequence[RunGroup]) -> str:
    """Return the pages about some runs as one Markdown document."""
    lines: list[str] = []
    for one in map(notice, groups):
        lines += [f"# For the data protection officer: {escaped(one.label)}", ""]
        for sentence in one.short:
            lines += [escaped(sentence), ""]
        for topic in one.topics:
            lines += [f"## {topic.title}", ""]
            for block in topic.blocks:
                lines += [*markdown_lines(block), ""]

    text = together(groups) if len(groups) > 1 else None
    if text is not None:
        lines += ["# All runs of this page", "", escaped(text), ""]
    return "\n".join(lines)


def markdown_lines(block: str | list[str] | Table) -> Iterable[str]:
    """Return a paragraph, a list or a table as lines of Markdown."""
    if isinstance(block, str):
        return [escaped(block)]
    if isinstance(block, list):
        return [f"- {escaped(point)}" for point in block]
    rows = [block.heads, ("---",) * len(block.heads), *block.rows]
    return [f"| {' | '.join(map(escaped, row))} |" for row in rows]


def escaped(text: str) -> str:
    """Return text that Markdown shows as it is: names of runs and folders are text and no markup."""
    plain = "".join(f"\\{sign}" if sign in "\\`*_[]<>|#" else sign for sign in text)
    return " ".join(plain.split())
