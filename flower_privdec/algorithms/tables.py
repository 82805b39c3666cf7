"""Memories of past gradients for variance reduction: dense, factored, by blocks, and a snapshot.

Each offers the SAGA estimate of eq. 6 of PrivSGP-VR (Zhu et al.), over a batch S of expected size b,

    g = (1/b) Σ_{j in S} (g_j - table_j) + mean(table),    then    table_j ← g_j for j in S,

with g_j the clipped gradient of example j now and table_j the one of the last round that used it. They
differ in what they keep. The state they keep is rows of the cohort's state, so that a checkpoint has it.

Each is a class of three functions: `initial` fills the rows of the memory with clipped gradients at x [m, d]; `add_`
adds scale b g to step.out and remembers the batch's gradients; `floats` counts the numbers that the memory takes, for
peers of so many examples, d parameters, linear layers of (inputs, outputs) and so many examples in a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flower_privdec.algorithms import snapshot
from flower_privdec.common.catalogue import Choice
from flower_privdec.common.deferred import is_small, torch
from flower_privdec.common.errors import ScenarioError
from flower_privdec.core.cohort import Cohort, PrivateStep
from flower_privdec.data import Batch
from flower_privdec.rows.tensors import compiled, padded, put_back

if TYPE_CHECKING:
    from torch import Tensor

    from flower_privdec.gradients import Factors, GradientKernel, StackedKernel


FILL = 256  # examples at a time when a table is filled at the starting point

GRADIENT_TABLES = Choice(
    {
        "factored": "deltas and activations of each example: exact, for stacks of linear layers",
        "blocks": "one mean gradient for each fixed mini-batch; with data.batch.sampling: blocks",
        "snapshot": "a model and its full gradient, taken every `snapshot_every` rounds (SVRG)",
        "dense": "every example's gradient, for any model",
    }
)

Rows: TypeAlias = "dict[str, Tensor]"


def _ones(cohort: Cohort, count: int) -> Tensor:
    return torch.ones(count, dtype=cohort.dtype, device=cohort.device)


def _clip(cohort: Cohort) -> Tensor | None:
    """Return the clip norm before step 0."""
    if cohort.protection is None:
        return None
    return cohort.tensor(cohort.protection.clip_norm(0))


def _longest(cohort: Cohort) -> int:
    """Return the most examples any peer here has: how long every peer's table is."""
    return int(cohort.data.sampler.partition_sizes.max())


def _fills(cohort: Cohort) -> Iterator[tuple[int, Batch]]:
    longest = _longest(cohort)
    for start in range(0, longest, FILL):
        yield start, cohort.data.examples(cohort.rows, start, min(start + FILL, longest))


def _slot(batch: Batch, b: int) -> Batch:
    return Batch(*(part[:, b : b + 1] for part in (batch.x, batch.y, batch.weight, batch.index)))


def _add_mean_(state: Rows, cohort: Cohort, step: PrivateStep) -> None:
    """Add scale b mean(table) to out."""
    whole = step.scale * cohort.tensor(cohort.data.sampler.normalizer[step.rows])
    step.out.addcmul_(whole.unsqueeze(1), state["table.mean"][cohort.places(step.rows)])


def _put_(table: Tensor, rows: Tensor, batch: Batch, values: Tensor) -> None:
    """Write a batch's values [r, b, ·] to their examples' places in some rows [r, 1] of a table.

    Padding repeats what the first place of its row gets: to leave it out by a mask, a GPU would have to be waited for.
    """
    used = batch.weight > 0
    first = batch.index[:, :1]
    first_values = torch.where(used[:, :1, None], values[:, :1], table[rows, first])
    table[rows, torch.where(used, batch.index, first)] = torch.where(used.unsqueeze(2), values, first_values)


def _per_example(cohort: Cohort, rows: np.ndarray) -> Tensor:
    return 1 / cohort.tensor(cohort.data.sampler.partition_sizes[rows].astype(np.float64))


def renew_(
    out: Tensor,
    state: Rows,
    now: Tensor,
    rows: np.ndarray,
    places: Tensor,
    whole: Tensor,
    scale: Tensor,
    share: Tensor,
) -> None:
    """Exchange one entry of each row's table: in one pass over the rows, compiled, on a CPU.

        out_i += whole_i mean_i + scale_i (now_i - table_i),   mean_i += share_i (now_i - table_i),   table_i ← now_i

    Args:
        out: the sums of the step, [r, d].
        state: with `table`, [m, entries, d], and `table.mean`, [m, d].
        now: the new entries, [r, d].
        rows: the places of these rows in the cohort, int64 [r].
        places: which entry of each is exchanged, int64 [r].
        whole, scale, share: of each row, [r].
    """
    table = state["table"]
    mean = state["table.mean"]
    if out.is_cpu and out.dtype in (torch.float32, torch.float64) and table.is_contiguous() and not is_small():
        arrays = [padded(part) for part in (out, mean, now)]
        views = [part.numpy() for part in arrays if part is not None]
        if len(views) == len(arrays):
            numbers = (part.contiguous().numpy() for part in (places, whole, scale, share))
            _compiled_renewal()(*views, table.numpy(), rows, *numbers)
            return

    where = torch.as_tensor(rows, device=out.device)
    change = now - table[where, places]
    out.addcmul_(whole.unsqueeze(1), mean[where]).addcmul_(scale.unsqueeze(1), change)
    mean[where] += share.unsqueeze(1) * change
    table[where, places] = now


@cache
def _compiled_renewal() -> Any:
    """Compile the loop when it is first needed: numba takes long to import."""
    return compiled(_renew)


def _renew(out, mean, now, table, rows, places, whole, scale, share):  # type: ignore[no-untyped-def]
    for i in range(len(rows)):
        row = rows[i]
        entry = table[row, places[i]]
        for c in range(table.shape[2]):
            change = now[i, c] - entry[c]
            out[i, c] += whole[i] * mean[row, c] + scale[i] * change
            mean[row, c] += share[i] * change
            entry[c] = now[i, c]


class Dense:
    """Every example's gradient written out, [m, J, d]: any model, much memory; the oracle of the others."""

    @staticmethod
    def initial(cohort: Cohort, x: Tensor) -> Rows:
        """Fill the table at x."""
        table = x.new_zeros(len(x), _longest(cohort), x.shape[1])
        clip = _clip(cohort)
        one = _ones(cohort, len(x))
        for start, batch in _fills(cohort):
            for b in range(batch.y.shape[1]):
                cohort.kernel.add_clipped_(table[:, start + b], x, _slot(batch, b), clip, one)
        return {"table": table, "table.mean": table.sum(1) * _per_example(cohort, cohort.rows).unsqueeze(1)}

    @staticmethod
    def add_(state: Rows, cohort: Cohort, step: PrivateStep) -> None:
        """Take one example of the batch after the other."""
        # Every example's gradient is taken at the parameters of before the step.
        point = step.params
        if step.out is step.params:
            point = step.params.clone()
        # The mean is added once, as it is before the first example.
        _add_mean_(state, cohort, step)

        share = _per_example(cohort, step.rows)
        one = _ones(cohort, len(step.rows))
        for b in range(step.batch.y.shape[1]):
            slot = _slot(step.batch, b)
            now = torch.zeros_like(point)
            cohort.kernel.add_clipped_(now, point, slot, step.clip_norm, one, step.divisor)

            # Rows with a smaller batch have no example in this slot, and their entry stays.
            used = slot.weight[:, 0] > 0
            places = slot.index[:, 0]
            if bool(used.all()):
                renew_(step.out, state, now, step.rows, places, 0 * share, step.scale, share)
                continue
            chosen = torch.as_tensor(step.rows, device=cohort.device)[used]
            part = step.out[used]
            renew_(
                part,
                state,
                now[used],
                chosen.cpu().numpy(),
                places[used],
                0 * share[used],
                step.scale[used],
                share[used],
            )
            step.out[used] = part

    @staticmethod
    def floats(sizes: np.ndarray, d: int, widths: list[tuple[int, int]], batch: int) -> int:
        """Return n (J + 1) d."""
        return len(sizes) * (int(sizes.max()) + 1) * d


class Factored:
    """Every example's deltas and hidden activations, from which its gradient follows exactly.

    For stacks of linear layers the gradient of layer l is delta_l (outer) a_l, where a_0 is the example
    itself and need not be kept. The clip coefficient is folded into the deltas.
    """

    @staticmethod
    def initial(cohort: Cohort, x: Tensor) -> Rows:
        """Fill the table at x."""
        kernel = stacked(cohort.kernel)
        longest = _longest(cohort)

        # The first layer's inputs are the examples themselves, which are kept already.
        rows = {"table.mean": torch.zeros_like(x)}
        for number, layer in enumerate(kernel.layers):
            out, inner = layer.weight.shape
            rows[f"table.delta{number}"] = x.new_zeros(len(x), longest, out)
            if number:
                rows[f"table.input{number}"] = x.new_zeros(len(x), longest, inner)

        share = _per_example(cohort, cohort.rows)
        for start, batch in _fills(cohort):
            stop = start + batch.y.shape[1]
            factors = _folded(kernel.factors(x, batch), batch, _clip(cohort))
            for name, value in _named(factors):
                rows[name][:, start:stop] = value * batch.weight.unsqueeze(2)  # 0 past a peer's last example
            kernel.accumulate_(rows["table.mean"], factors, batch.weight * share.unsqueeze(1))
        return rows

    @staticmethod
    def add_(state: Rows, cohort: Cohort, step: PrivateStep) -> None:
        """Take the whole batch at once: new factors in, old factors out."""
        kernel = stacked(cohort.kernel)
        batch = step.batch
        rows = torch.as_tensor(step.rows, device=cohort.device)

        new = _folded(kernel.factors(step.params, batch, step.divisor), batch, step.clip_norm)
        where = (rows.unsqueeze(1), batch.index)
        old = _joined(new, [(state[name][where] if name in state else None) for name, _ in _all(new)])
        _add_mean_(state, cohort, step)

        # New less old, in one product a layer: each pass over the rows counts.
        change = _differences(new, old)
        weight = batch.weight * step.scale.unsqueeze(1)
        share = batch.weight * _per_example(cohort, step.rows).unsqueeze(1)
        at = cohort.places(step.rows)
        mean = state["table.mean"][at]
        for target, coefficient in ((step.out, weight), (mean, share)):
            _push_(kernel, target, change, coefficient)
        put_back(state["table.mean"], at, mean)

        for name, value in _named(new):
            _put_(state[name], rows.unsqueeze(1), batch, value)

    @staticmethod
    def floats(sizes: np.ndarray, d: int, widths: list[tuple[int, int]], batch: int) -> int:
        """Return n (J Σ_l (outputs + hidden inputs) + d)."""
        per_example = sum(out for _, out in widths) + sum(inner for inner, _ in widths[1:])
        return len(sizes) * (int(sizes.max()) * per_example + d)


def stacked(kernel: GradientKernel) -> StackedKernel:
    """Return the kernel of a stack of linear layers, or refuse any other model's."""
    from flower_privdec.gradients import StackedKernel

    if not isinstance(kernel, StackedKernel):
        raise ScenarioError(
            "algorithm.table='factored' needs a stack of linear layers (linear or mlp); "
            "use snapshot, blocks or dense for this model",
            code="tables.not-stacked",
        )
    return kernel


def _folded(factors: Factors, batch: Batch, clip_norm: Tensor | None) -> Factors:
    """Return factors whose deltas carry the clip coefficient."""
    from flower_privdec.gradients.protocol import Clipping

    ones = torch.ones_like(batch.weight[:, 0])
    clip = Clipping(clip_norm, ones).coefficient(factors.norms, torch.ones_like(batch.weight)).unsqueeze(-1)
    return replace(factors, deltas=[delta * clip for delta in factors.deltas])


def _all(factors: Factors) -> list[tuple[str, Tensor]]:
    deltas = [(f"table.delta{number}", value) for number, value in enumerate(factors.deltas)]
    return deltas + [(f"table.input{number}", value) for number, value in enumerate(factors.activations)]


def _named(factors: Factors) -> list[tuple[str, Tensor]]:
    """Return the parts of factors that a table keeps: all but the examples themselves."""
    return [item for item in _all(factors) if item[0] != "table.input0"]


def _differences(new: Factors, old: Factors) -> list[tuple[Tensor, Tensor]]:
    """Return deltas and inputs of each layer, whose products are the new gradients less the old ones.

    The inputs of the first layer are the examples, the same in both, so that their deltas are subtracted. To further
    layers the old ones come as more examples.
    """
    pairs = [(new.deltas[0] - old.deltas[0], new.activations[0])]
    for layer in range(1, len(new.deltas)):
        delta = torch.cat([new.deltas[layer], -old.deltas[layer]], 1)
        pairs.append((delta, torch.cat([new.activations[layer], old.activations[layer]], 1)))
    return pairs


def _push_(kernel: StackedKernel, out: Tensor, pairs: list[tuple[Tensor, Tensor]], coefficient: Tensor) -> None:
    """Add products of deltas and inputs to rows, each example times its coefficient [m, b]."""
    with torch.no_grad():
        for layer, (delta, inputs) in zip(kernel.layers, pairs, strict=True):
            times = delta.shape[1] // coefficient.shape[1]  # 2 where old ones follow the new
            layer.push_(out, delta * coefficient.repeat(1, times).unsqueeze(-1), inputs)


def _joined(like: Factors, values: list[Tensor | None]) -> Factors:
    """Return factors from kept values, in the order of `_all`; the examples come from `like`."""
    layers = len(like.deltas)
    deltas = [value for value in values[:layers] if value is not None]
    inputs = [like.activations[0], *(value for value in values[layers + 1 :] if value is not None)]
    return replace(like, deltas=deltas, activations=inputs)


class Blocks:
    """One mean gradient for each fixed mini-batch, [m, c, d]; needs sampling `blocks`.

    One of c = floor(J / b) blocks is drawn uniformly and every example of it is used, so an entry stands for the b or
    more examples of a block. It is their sum over J / c, so that a block drawn at random is without bias.
    """

    @staticmethod
    def initial(cohort: Cohort, x: Tensor) -> Rows:
        """Fill the table at x, block by block."""
        sampler = cohort.data.sampler
        counts = sampler.blocks(cohort.rows)
        table = x.new_zeros(len(x), int(counts.max()), x.shape[1])

        clip = _clip(cohort)
        share = 1 / cohort.tensor(sampler.normalizer)
        for block in range(int(counts.max())):
            # A peer with fewer blocks takes its last one again, which is then set to nothing.
            batch = cohort.data.block(cohort.rows, np.minimum(block, counts - 1))
            cohort.kernel.add_clipped_(table[:, block], x, batch, clip, share)
            table[torch.as_tensor(counts <= block), block] = 0

        mean = table.sum(1) / cohort.tensor(counts.astype(np.float64)).unsqueeze(1)
        return {"table": table, "table.mean": mean}

    @staticmethod
    def add_(state: Rows, cohort: Cohort, step: PrivateStep) -> None:
        """Exchange the drawn block's entry."""
        sampler = cohort.data.sampler
        counts = sampler.blocks(step.rows)
        size = cohort.tensor(sampler.normalizer[step.rows])
        now = torch.zeros_like(step.params)
        cohort.kernel.add_clipped_(now, step.params, step.batch, step.clip_norm, 1 / size, step.divisor)

        places = step.batch.index[:, 0] % torch.as_tensor(counts, device=cohort.device)
        share = 1 / cohort.tensor(counts.astype(np.float64))
        renew_(step.out, state, now, step.rows, places, step.scale * size, step.scale * size, share)

    @staticmethod
    def floats(sizes: np.ndarray, d: int, widths: list[tuple[int, int]], batch: int) -> int:
        """Return n (J / b + 1) d."""
        return len(sizes) * (int(sizes.max()) // max(1, batch) + 1) * d


Table = type[Dense] | type[Factored] | type[Blocks]
TABLES: dict[str, Table] = GRADIENT_TABLES.some("factored", "blocks", "dense").bind(
    {"factored": Factored, "blocks": Blocks, "dense": Dense}
)


def table_sizes(kernel: GradientKernel, sizes: np.ndarray, d: int, batch: int) -> dict[str, int | None]:
    """Return how many numbers each kind of memory takes; factored is None if the model is not a stack of linear layers.

    Args:
        sizes: examples of each peer.
        d: parameters.
        batch: examples in a block.
    """
    from flower_privdec.gradients import StackedKernel

    layers = []
    if isinstance(kernel, StackedKernel):
        layers = kernel.layers
    widths = [(layer.weight.shape[1], layer.weight.shape[0]) for layer in layers]
    counts: dict[str, int | None] = {name: table.floats(sizes, d, widths, batch) for name, table in TABLES.items()}
    counts["snapshot"] = snapshot.floats(len(sizes), d)
    if not layers:
        counts["factored"] = None
    return GRADIENT_TABLES.bind(counts)
