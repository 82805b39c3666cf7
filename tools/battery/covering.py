"""Arrays that cover every pair, or triple, of what can be chosen, grown around what is refused.

A row gives each factor a level. A refused pair hides all others of its row, so rows are not drawn beforehand: a row
that is refused is reduced to the few levels that cause it, which no later row has together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from math import comb
from random import Random

Row = tuple[int, ...]  # the number of each factor's level
Part = frozenset[tuple[int, int]]  # some factors, each with a level
Applies = Callable[[Mapping[int, int]], list[int]]


@dataclass
class Array:
    """An array of strength t that is grown row by row.

    Args:
        sizes: how many levels each factor has; level 0 fits whatever fits at all.
        applies: returns which of some chosen factors do something beside the others; the rest count for nothing.
        strength: t, how many factors are to meet.
        seed: of the order in which tuples are covered.
        decisive: factors that decide whether others apply; a row's are chosen first.

    Attributes:
        uncovered: the tuples that no row has had.
        refused: the least sets of levels that were refused.
        covered: how many tuples rows had.
        impossible: how many tuples were never to be had: a factor in them does nothing beside the other.
    """

    sizes: Sequence[int]
    applies: Applies
    strength: int = 2
    seed: int = 1
    decisive: Sequence[int] = ()
    uncovered: set[Part] = field(default_factory=set)
    refused: set[Part] = field(default_factory=set)
    covered: int = 0
    impossible: int = 0

    def __post_init__(self) -> None:
        self._draw = Random(self.seed)
        self._order: list[Part] = []
        self._refused_by: dict[tuple[int, int], list[Part]] = {}
        for factors in combinations(range(len(self.sizes)), self.strength):
            for levels in product(*(range(self.sizes[factor]) for factor in factors)):
                chosen = dict(zip(factors, levels, strict=True))
                if len(self.applies(chosen)) == self.strength:
                    self.uncovered.add(frozenset(chosen.items()))
                else:
                    self.impossible += 1

    def rows(self) -> Iterator[Row]:
        """Yield rows until nothing is left to cover; `accept` or `refuse` each before the next is taken."""
        self._order = sorted(self.uncovered, key=sorted)
        self._draw.shuffle(self._order)
        while self._order:
            wanted = self._order[-1]
            if wanted not in self.uncovered:
                self._order.pop()
                continue
            if self._is_refused(dict(wanted)) or (row := self._filled(dict(wanted))) is None:
                self.uncovered.discard(wanted)
                continue
            yield row

    def accept(self, row: Row) -> int:
        """Count a row's tuples as covered; return how many are new."""
        factors = self.applies(dict(enumerate(row)))
        new = {
            part
            for chosen in combinations(factors, self.strength)
            if (part := frozenset((factor, row[factor]) for factor in chosen)) in self.uncovered
        }
        self.uncovered -= new
        self.covered += len(new)
        return len(new)

    def refuse(self, part: Part) -> None:
        """Remember levels that are refused together; no later row has them all."""
        self.refused.add(part)
        for item in part:
            self._refused_by.setdefault(item, []).append(part)
        self.uncovered.difference_update(self._tuples_with(part))

    def _tuples_with(self, part: Part) -> Iterator[Part]:
        """Yield the tuples that have all levels of a part: far fewer than there are tuples."""
        missing = self.strength - len(part)
        if missing < 0:
            return
        others = sorted(set(range(len(self.sizes))) - {factor for factor, _ in part})
        for factors in combinations(others, missing):
            for levels in product(*(range(self.sizes[factor]) for factor in factors)):
                yield part | frozenset(zip(factors, levels, strict=True))

    def _is_refused(self, chosen: dict[int, int], added: tuple[int, int] | None = None) -> bool:
        """Return whether chosen levels have a refused set among them, of which an added level is one."""
        items = chosen.items()
        candidates = self.refused if added is None else self._refused_by.get(added, ())
        return any(part <= items for part in candidates)

    def _filled(self, chosen: dict[int, int]) -> Row | None:
        """Return a row with some levels and others that cover as many more tuples as they can; None if none fits."""
        wanted = list(chosen)
        rest = [factor for factor in range(len(self.sizes)) if factor not in chosen]
        self._draw.shuffle(rest)
        rest.sort(key=lambda factor: factor not in self.decisive)
        for factor in rest:
            best, most = None, -1.0
            for level in self._draw.sample(range(self.sizes[factor]), self.sizes[factor]):
                chosen[factor] = level
                if self._is_refused(chosen, (factor, level)):
                    continue
                meaning = self.applies(chosen)
                if not set(wanted) <= set(meaning):
                    continue
                gain = self._gain(chosen, factor, meaning)
                if gain > most:
                    best, most = level, gain
            if best is None:
                del chosen[factor]
                return None
            chosen[factor] = best
        return tuple(chosen[factor] for factor in range(len(self.sizes)))

    def _gain(self, chosen: dict[int, int], factor: int, meaning: Collection[int]) -> float:
        """Return how many uncovered tuples a factor's level makes with the others that were chosen and apply."""
        if factor not in meaning:
            return -0.5
        others = [other for other in meaning if other != factor]
        own = (factor, chosen[factor])
        count = 0
        for some in combinations(others, self.strength - 1):
            count += frozenset([own, *((other, chosen[other]) for other in some)]) in self.uncovered
        return float(count)

    @property
    def total(self) -> int:
        """Return how many tuples there are, those included that cannot be had."""
        return sum(
            _product(self.sizes[factor] for factor in factors)
            for factors in combinations(range(len(self.sizes)), self.strength)
        )


def _product(numbers: Iterator[int]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def cause(row: Row, plain: Row, still: Callable[[Row], bool]) -> Part:
    """Return a least set of a row's levels that is refused beside plain ones for the others.

    Args:
        row: it is refused.
        plain: a row that is not.
        still: whether a row is refused for the same reason.
    """
    suspects = [factor for factor in range(len(row)) if row[factor] != plain[factor]]
    guilty: list[int] = []

    def refused(factors: Sequence[int]) -> bool:
        return still(tuple(row[f] if f in factors or f in guilty else plain[f] for f in range(len(row))))

    # The shortest beginning of the suspects that is refused ends with a guilty one; it is kept, and those after it go.
    while suspects and not refused(()):
        low, high = 0, len(suspects)
        while high - low > 1:
            middle = (low + high) // 2
            if refused(suspects[:middle]):
                high = middle
            else:
                low = middle
        guilty.append(suspects[high - 1])
        suspects = suspects[: high - 1]
    return frozenset((factor, row[factor]) for factor in guilty)


def least_rows(sizes: Sequence[int], strength: int) -> int:
    """Return how many rows an array has at least: the levels of the largest factors multiplied."""
    return _product(iter(sorted(sizes)[-strength:])) if comb(len(sizes), strength) else 0
