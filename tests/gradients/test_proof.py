"""Which modules are proved to keep examples apart, and what becomes of the others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loop_kernel import LoopKernel
from raising import raises
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from flower_privdec.common.errors import PrivdecError, RunError, ScenarioError
from flower_privdec.gradients import build_kernel, explain_kernel
from flower_privdec.gradients.factored import FactoredKernel
from flower_privdec.gradients.per_example import VmapKernel
from flower_privdec.gradients.proof import Unproved, prove
from flower_privdec.models import flatten, parameter_count

CLASSES, SHAPE = 4, (2, 6, 6)
Forward = Callable[["Own", Tensor], Tensor]


class Own(nn.Module):
    """A user's module: some layers, some buffers, and any forward."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.norm = nn.GroupNorm(3, 3)
        self.head = nn.Linear(108, CLASSES)
        self.small = nn.Linear(6, 6)
        self.flat = nn.Linear(72, CLASSES)
        self.act = nn.ReLU(inplace=True)
        self.over = nn.Softmax(0)
        self.register_buffer("channel", torch.tensor([0.5, 2.0])[:, None, None])
        self.register_buffer("place", torch.linspace(1, 2, 12))
        self.register_buffer("mixer", torch.linspace(-1, 1, 36).view(6, 6))
        self.register_buffer("first", torch.ones(1, 2, 1, 1))
        self.plain = torch.ones(2, 1, 1)
        self.calls = 0
        self.memory: list[Tensor] = []
        self.own = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self, x)


def images(m: Own, x: Tensor) -> Tensor:
    return m.head(m.act(m.norm(m.conv(x))).flatten(1))


def unpacked_sizes(m: Own, x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    return m.flat(x.view(b, c * h * w))


def in_place_sum(m: Own, x: Tensor) -> Tensor:
    y = m.conv(x)
    y += y.mean(dim=(2, 3), keepdim=True)
    return m.head(torch.tanh(y).flatten(start_dim=1))


def attention(m: Own, x: Tensor) -> Tensor:
    tokens = m.small(x.reshape(x.size(0), 12, 6))
    scores = torch.softmax(tokens @ tokens.transpose(1, 2) / 6**0.5, dim=-1)
    return m.flat((scores @ tokens).flatten(1))


def standardised(m: Own, x: Tensor) -> Tensor:
    x = x.flatten(1)
    return m.flat((x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-5))


def doubled(m: Own, x: Tensor) -> Tensor:
    return m.flat(torch.cat([x, 2 * x]).mean(0, keepdim=True).flatten(1))


PROVED: dict[str, Forward] = {
    "a plain forward": images,
    "sizes unpacked": unpacked_sizes,
    "view by -1": lambda m, x: m.flat(x.view(-1, 72)),
    "reshape by size": lambda m, x: m.flat(x.reshape(x.size(0), -1)),
    "a sum in place": in_place_sum,
    "a buffer of channels": lambda m, x: m.flat((x * m.channel - m.first).flatten(1)),
    "a tensor that is no buffer": lambda m, x: m.flat((x * m.plain).flatten(1)),
    "products of buffers": lambda m, x: m.flat((x * (m.channel * 2).abs() @ m.mixer).flatten(1)),
    "attention": attention,
    "pooling": lambda m, x: m.head(functional.relu(functional.max_pool2d(m.conv(x), 3, 1, 1)).flatten(1)),
    "parts and joints": lambda m, x: m.flat(torch.cat([x[:, 1:], x[:, :1]], dim=1).flatten(1)),
    "indices from behind": lambda m, x: m.small(x[..., 0]).mean(1)[:, :CLASSES] + m.flat(x.flatten(1)),
    "permuted": lambda m, x: m.flat(x.permute(0, 3, 1, 2).contiguous().flatten(1)),
    "squeezed": lambda m, x: m.flat(x.unsqueeze(1).squeeze(1).flatten(1)),
    "a choice": lambda m, x: m.flat(torch.where(x > 0, x, 0.1 * x).flatten(1)),
    "standardised": standardised,
    "layers called twice": lambda m, x: m.flat(m.small(torch.tanh(m.small(x))).flatten(1)),
    "a layer that is left out": lambda m, x: m.flat(x.flatten(1)),
    "reflected arithmetic": lambda m, x: m.flat((1 - 2 / (3 + x.square())).flatten(1)),
}


def limited(m: Own, x: Tensor) -> Tensor:
    return m.flat((x / x.abs().max().clamp(min=3.0)).flatten(1))


def switched(m: Own, x: Tensor) -> Tensor:
    return m.flat(x.flatten(1)) if x.abs().max() > 3 else -m.flat(x.flatten(1))


def turned(m: Own, x: Tensor) -> Tensor:
    y = m.flat(x.flatten(1))
    return y if y.sum() > 0 else -y


def counted(m: Own, x: Tensor) -> Tensor:
    m.calls += 1
    return m.flat(x.flatten(1)) * (1.0 if m.calls % 2 else -1.0)


def remembering(m: Own, x: Tensor) -> Tensor:
    before = m.memory[-1] if m.memory else torch.zeros(())
    m.memory.append(x.detach().mean())
    return m.flat(x.flatten(1)) + before


def normalised_by_hand(m: Own, x: Tensor) -> Tensor:
    x = x.flatten(1)
    return m.flat((x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt())


def crossed(m: Own, x: Tensor) -> Tensor:
    size = x.flatten(1).mean(1)
    return m.flat(x.flatten(1)) * (size * size[:, None]).mean(1)[:, None]


def all_tokens(m: Own, x: Tensor) -> Tensor:
    mixed = (x.flatten(1)[:, :12] @ x.reshape(-1, 12, 6)).mean(1)
    return m.small(mixed)[:, :CLASSES] + m.flat(x.flatten(1))


def changed_in_place(m: Own, x: Tensor) -> Tensor:
    y = m.flat(x.flatten(1))
    functional.relu(y, inplace=True)
    return y


def counted_in_a_buffer(m: Own, x: Tensor) -> Tensor:
    m.first = m.first + 1
    return m.flat(x.flatten(1))


def counted_in_place(m: Own, x: Tensor) -> Tensor:
    m.first += 1
    return m.flat(x.flatten(1))


def by_place(m: Own, x: Tensor) -> Tensor:
    return m.flat(x.flatten(1) * m.place[: x.shape[0]].unsqueeze(1))


def half_frozen(m: Own, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = m.small(x)
    return m.flat(x.flatten(1))


def reused_weight(m: Own, x: Tensor) -> Tensor:
    x = x.flatten(1)
    return m.flat(x) + functional.linear(x.tanh(), m.flat.weight)


UNPROVED: dict[str, tuple[Forward, tuple[str, ...]]] = {
    "divided by the largest": (limited, ("proof.unknown",)),
    "switched by the batch": (switched, ("proof.trace",)),
    "turned by its sum": (turned, ("proof.trace",)),
    "batch norm by hand": (normalised_by_hand, ("proof.over-batch",)),
    "running sum over the batch": (lambda m, x: m.flat(x.cumsum(0).flatten(1)), ("proof.over-batch",)),
    "the first for all": (lambda m, x: m.flat((x - x[0]).flatten(1)), ("proof.index",)),
    "the first two for all": (lambda m, x: m.flat((x - x[:1]).flatten(1)), ("proof.index",)),
    "rolled": (lambda m, x: m.flat(x.roll(1, 0).flatten(1)), ("proof.unknown",)),
    "sorted": (lambda m, x: m.flat(x.sort(0).values.flatten(1)), ("proof.unknown",)),
    "scaled by the batch size": (lambda m, x: m.flat(x.flatten(1)) * x.shape[0], ("proof.batch-size",)),
    "scaled by len": (lambda m, x: m.flat(x.flatten(1)) * len(x), ("proof.trace",)),
    "a buffer by place": (by_place, ("proof.first",)),
    "a buffer of the batch's length": (lambda m, x: m.flat(x.flatten(1) * m.place[:3, None]), ("proof.place",)),
    "lined up with another axis": (lambda m, x: m.flat((x - x[:, 0, 0, 0]).flatten(1)), ("proof.aligned",)),
    "every example with every other": (crossed, ("proof.aligned",)),
    "every example's tokens with all": (all_tokens, ("proof.product",)),
    "a softmax layer over the batch": (lambda m, x: m.over(m.flat(x.flatten(1))), ("proof.over-batch", "'over'")),
    "mixed by a product": (lambda m, x: m.flat((x.flatten(1) @ x.flatten(1).t()) @ x.flatten(1)), ("proof.unknown",)),
    "mixed by a matrix": (lambda m, x: m.flat((m.mixer[:1, :1] @ x.flatten(1)).flatten(1)), ("proof.product",)),
    "transposed": (lambda m, x: m.flat(x.transpose(0, 1).reshape(-1, 72)), ("proof.batch-moved",)),
    "permuted away": (lambda m, x: m.flat(x.permute(1, 0, 2, 3).reshape(-1, 72)), ("proof.batch-moved",)),
    "folded": (lambda m, x: m.flat(x.flatten(0, 1).reshape(-1, 72)), ("proof.batch-moved",)),
    "joined along the batch": (doubled, ("proof.no-axes",)),
    "softmax over the batch": (lambda m, x: m.flat(x.softmax(0).flatten(1)), ("proof.over-batch",)),
    "the mean of all": (lambda m, x: m.flat((x - x.mean()).flatten(1)), ("proof.no-axes",)),
    "a weight used elsewhere": (reused_weight, ("proof.parameter", "'flat.weight'")),
    "a Python counter": (counted, ("proof.outputs-differ",)),
    "a part without gradients": (half_frozen, ("proof.outputs-differ",)),
    "a memory": (remembering, ("proof.unknown",)),
    "a counter in a buffer": (counted_in_a_buffer, ("proof.buffer", "'first'")),
    "a counter in a buffer's place": (counted_in_place, ("proof.buffer", "'first'")),
    "a change in place": (changed_in_place, ("proof.in-place",)),
    "random numbers": (lambda m, x: m.flat((x + torch.rand_like(x)).flatten(1)), ("proof.unknown", "rand_like")),
    "numbers of a tensor": (lambda m, x: m.flat(x.flatten(1)) * x.sum().item(), ("proof.no-axes",)),
    "an index by numbers": (lambda m, x: m.flat(x[[0] * 1].flatten(1)), ("proof.index",)),
    "a method that is not torch's": (lambda m, x: m.flat(torch.from_numpy(x.numpy()).flatten(1)), ("proof.trace",)),
}
REFUSED = {  # what vmap cannot differentiate either
    "switched by the batch",
    "turned by its sum",
    "a buffer of the batch's length",
    "a counter in a buffer's place",
    "random numbers",
    "numbers of a tensor",
    "a method that is not torch's",
}
FLAT = {"batch norm by hand", "a softmax layer over the batch"}  # of a batch of one the output is the same whatever


def own(forward: Forward) -> Own:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Own(forward)


def examples(count: int, size: float = 1.0) -> Tensor:
    return size * torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("name", PROVED)
def test_proved_modules_compute_forward_and_keep_examples_apart(name: str) -> None:
    module = own(PROVED[name]).double()
    graph, x = prove(module, SHAPE), examples(5).double()
    graph.load_state_dict(module.state_dict(), strict=False)
    torch.testing.assert_close(graph(x), module(x))
    changed = x.clone()
    changed[1] *= -1e3
    others = [0, 2, 3, 4]
    torch.testing.assert_close(graph(changed)[others], graph(x)[others], rtol=0, atol=0)
    for example, output in zip(x, graph(x), strict=True):
        torch.testing.assert_close(graph(example[None])[0], output)


@pytest.mark.parametrize("name", PROVED)
def test_gradients_of_what_is_proved_are_the_loop_s(name: str) -> None:
    module = own(PROVED[name])
    kernel = build_kernel(module, "cross-entropy", SHAPE)
    assert isinstance(kernel, FactoredKernel)
    rows = flatten(module).double().repeat(2, 1)
    batch = Batch(examples(6).view(2, 3, *SHAPE).double())
    clip, scale = torch.tensor([0.5, 1e6]).double(), torch.tensor([1.0, -2.0]).double()
    sums, expected = torch.zeros_like(rows), torch.zeros_like(rows)
    kernel.add_clipped_(sums, rows, batch, clip, scale)
    LoopKernel(module, kernel._loss).add_clipped_(expected, rows, batch, clip, scale)
    torch.testing.assert_close(sums, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", UNPROVED)
def test_unproved_modules_are_named(name: str) -> None:
    forward, refusal = UNPROVED[name]
    with raises(Unproved, *refusal):
        prove(own(forward), SHAPE)


class Batch:
    """Examples of several rows, with all labels 1."""

    def __init__(self, x: Tensor, weight: Tensor | None = None) -> None:
        self.x = x
        self.y = torch.ones(x.shape[:2], dtype=torch.int64)
        self.weight = torch.ones(x.shape[:2], dtype=x.dtype) if weight is None else weight


@pytest.mark.parametrize("name", [*PROVED, *UNPROVED])
def test_one_example_of_any_module_respects_the_clip_norm(name: str) -> None:
    """Zeroing one example out, whatever the module; several times, for those that remember."""
    module = own(PROVED[name] if name in PROVED else UNPROVED[name][0])
    if name in REFUSED:
        with raises(ScenarioError, "model.per-example"):
            build_kernel(module, "cross-entropy", SHAPE)
        return
    kernel, other = (build_kernel(module, "cross-entropy", SHAPE) for _ in range(2))
    assert type(kernel) is (FactoredKernel if name in PROVED else VmapKernel)
    rows, clip, scale = flatten(module)[None], torch.tensor([0.3]), torch.tensor([1.0])
    for size in (1.0, -1.0, 10.0, -10.0, 1e4, -1e4):
        x = examples(5)[None]
        x[0, 1] *= size
        weight = torch.ones(1, 5)
        weight[0, 1] = 0
        whole, rest = torch.zeros_like(rows), torch.zeros_like(rows)
        kernel.add_clipped_(whole, rows, Batch(x), clip, scale)
        other.add_clipped_(rest, rows, Batch(x, weight), clip, scale)
        assert (whole - rest).norm() <= 0.3 * (1 + 1e-5)
        assert whole.any() or name in FLAT


def unhooked() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, CLASSES))


class Louder(nn.Linear):
    """A subclass, which may do anything."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


def with_subclass() -> nn.Module:
    return nn.Sequential(nn.Flatten(), Louder(72, CLASSES))


def with_hook() -> nn.Module:
    module = unhooked()
    module[0].register_forward_hook(lambda layer, inputs, output: output - output.mean(0))
    return module


def with_hook_before() -> nn.Module:
    module = unhooked()
    module[2].register_forward_pre_hook(lambda layer, inputs: (inputs[0].cumsum(0),))
    return module


def with_hook_around() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(72, CLASSES))
    module.register_forward_hook(lambda layer, inputs, output: output - output.mean(0))
    return module


def with_own_forward() -> nn.Module:
    module = unhooked()
    plain = module[0].forward
    module[0].forward = lambda x: plain(x.roll(1, 0))
    return module


def with_own_forward_around() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(72, CLASSES))
    module.forward = lambda x: module[1](x.flatten(1).roll(1, 0))
    return module


def with_parametrization() -> nn.Module:
    return nn.Sequential(nn.Flatten(), parametrizations.weight_norm(nn.Linear(72, CLASSES)))


def with_tied_weights() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(72, 72, bias=False), nn.Linear(72, 72, bias=False), nn.Linear(72, 4))
    module[2].weight = module[1].weight
    return module


def with_one_layer_twice() -> nn.Module:
    layer = nn.Linear(72, 72)
    return nn.Sequential(nn.Flatten(), layer, nn.Tanh(), layer, nn.Linear(72, CLASSES))


STRANGE: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "a subclass": (with_subclass, ("proof.parameters",)),
    "a hook": (with_hook, ("proof.hooks", "Conv2d '0'")),
    "a hook before": (with_hook_before, ("proof.hooks",)),
    "a hook on the whole": (with_hook_around, ("proof.hooks",)),
    "a forward of its own": (with_own_forward, ("proof.hooks", "Conv2d '0'")),
    "a forward of the whole": (with_own_forward_around, ("proof.hooks",)),
    "a parametrization": (with_parametrization, ("proof.parameters",)),
    "tied weights": (with_tied_weights, ("proof.tied", "'1.weight'")),
    "a layer twice": (with_one_layer_twice, ("proof.tied",)),
    "groups": (
        lambda: nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.Flatten(), nn.Linear(32, 4)),
        ("proof.parameters",),
    ),
    "a slope": (lambda: nn.Sequential(nn.PReLU(), nn.Flatten(), nn.Linear(72, 4)), ("proof.parameters", "PReLU '0'")),
}


@pytest.mark.parametrize("name", STRANGE)
def test_only_plain_layers_are_fast(name: str) -> None:
    """A layer is known by its exact class, and only if nothing was hung on it."""
    make, refusal = STRANGE[name]
    module = make()
    kernel = build_kernel(copy.deepcopy(module), "cross-entropy", SHAPE)
    assert isinstance(kernel, VmapKernel)
    with raises(Unproved, *refusal) as why:
        prove(module, SHAPE)
    assert str(why.value) in explain_kernel(kernel)


def test_the_kernel_is_explained_in_a_sentence() -> None:
    sequence = nn.Sequential(nn.Flatten(), nn.Linear(72, CLASSES))
    kernels = [
        build_kernel(model, "cross-entropy", SHAPE) for model in (sequence, own(images), own(normalised_by_hand))
    ]
    assert explain_kernel(kernels[0]).startswith("stacked (")
    assert explain_kernel(kernels[1]).startswith("factored (")
    assert explain_kernel(kernels[2]) == (
        "vmap (any model: torch.func, a few examples at a time), because it is not proved that the model keeps "
        "examples apart: mean works over the axis of the batch"
    )


def test_linear_layers_over_positions_are_no_stack() -> None:
    module = nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, CLASSES))
    assert isinstance(build_kernel(module, "cross-entropy", SHAPE), FactoredKernel)


def test_the_proof_leaves_module_and_random_state_unchanged() -> None:
    module, state = own(images), torch.get_rng_state()
    before = copy.deepcopy(module.state_dict())
    prove(module, SHAPE)
    build_kernel(own(counted), "cross-entropy", SHAPE)
    assert torch.equal(torch.get_rng_state(), state)
    assert module.act.inplace
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


def test_images_without_channels_are_not_taken_for_a_batch() -> None:
    """A convolution of [2, H, W] would take the two examples for its two channels."""
    module = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Flatten(), nn.Linear(36, CLASSES))
    with raises(Unproved, "proof.fails", "Conv2d '0'"):
        prove(module, (6, 6))


class Words(nn.Module):
    """Features that are indices."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(10, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.table(x.long()).mean(1))


def test_models_of_words_go_under_vmap() -> None:
    module = Words()
    kernel, rows = build_kernel(module, "cross-entropy", (7,)), flatten(module)[None]
    assert isinstance(kernel, VmapKernel)
    batch = Batch(torch.randint(0, 10, (1, 3, 7), generator=torch.Generator().manual_seed(0)).float())
    sums, expected, clip = torch.zeros_like(rows), torch.zeros_like(rows), torch.tensor([0.1])
    kernel.add_clipped_(sums, rows, batch, clip, torch.ones(1))
    LoopKernel(module, kernel._loss).add_clipped_(expected, rows, batch, clip, torch.ones(1))
    torch.testing.assert_close(sums, expected, rtol=2e-4, atol=1e-7)
    assert sums[:, :50].any()


class Secretive(nn.Module):
    """Fails on large examples, and says what they are."""

    def __init__(self, failure: type[Exception]) -> None:
        super().__init__()
        self.layer = nn.Linear(72, CLASSES)
        self.failure = failure
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if SECRETS:
            raise self.failure(f"a secret: {SECRETS}")
        return self.layer(torch.sort(x.flatten(1)).values)


SECRETS: list[float] = []


@pytest.mark.parametrize("failure", [RuntimeError, KeyError, ZeroDivisionError])
def test_an_error_on_private_examples_keeps_what_it_said(failure: type[Exception]) -> None:
    module = Secretive(failure)
    kernel, rows = build_kernel(module, "cross-entropy", SHAPE), torch.zeros(1, parameter_count(module))
    try:
        SECRETS.append(42.5)
        with raises(RunError, "code.withheld", failure.__name__) as caught:
            kernel.add_clipped_(rows, rows, Batch(examples(2)[None]), None, torch.ones(1))
    finally:
        SECRETS.clear()
    error: Any = caught.value
    while error is not None:
        assert isinstance(error, PrivdecError)
        assert "42.5" not in str(error)
        error = error.__context__ or error.__cause__


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda m, x: m.flat(x.flatten(1)) * x.sum().item(), "item"),
        (lambda m, x: m.flat(x.flatten(1)).squeeze(), r"its output for one example is \[4\]"),
        (lambda m, x: (m.place.copy_(x.flatten(1)[0, :12]), m.flat(x.flatten(1)))[1], "inplace|in-place"),
        (lambda m, x: m.flat(x), "RuntimeError: "),
        (lambda m, x: m.nothing(x), "AttributeError: .*nothing"),
    ],
    ids=["item", "squeezed", "a buffer changed", "shapes", "a mistake"],
)
def test_modules_beyond_vmap_are_refused_before_the_run(forward: Forward, message: str) -> None:
    with raises(ScenarioError, "model.per-example", names=f"(?s){message}.*torch.where"):
        build_kernel(own(forward), "cross-entropy", SHAPE)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_model_that_cannot_be_copied_is_refused() -> None:
    module = nn.Sequential(nn.Flatten(), nn.utils.weight_norm(nn.Linear(72, CLASSES)))
    with raises(ScenarioError, "model.copy", names="RuntimeError: .*deepcopy.*parametrizations"):
        build_kernel(module, "cross-entropy", SHAPE)


def test_a_module_under_vmap_forgets_its_attributes_between_calls() -> None:
    module = own(remembering)
    kernel = build_kernel(module, "cross-entropy", SHAPE)
    rows, scale = flatten(module)[None], torch.ones(1)
    results = []
    for size in (1.0, 1e3, 1.0):
        out = torch.zeros_like(rows)
        kernel.add_clipped_(out, rows, Batch(examples(3, size)[None]), None, scale)
        results.append(out)
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], results[1])
    assert not module.memory


def halved(module: nn.Module, x: Tensor) -> Tensor:
    """Halve a weight in place, unseen by autograd, and use it."""
    module.flat.weight.data.mul_(0.5)  # type: ignore[union-attr, operator]
    result: Tensor = module.flat(x.flatten(1))  # type: ignore[operator]
    return result


def test_vmap_computes_the_same_at_every_call() -> None:
    spectral = nn.Sequential(nn.Flatten(), nn.utils.parametrizations.spectral_norm(nn.Linear(72, CLASSES)))
    for module in (spectral, own(halved)):
        kernel = build_kernel(module, "cross-entropy", SHAPE, kind="vmap")
        rows = torch.randn(1, kernel.d, generator=torch.Generator().manual_seed(1))
        before, results = rows.clone(), []
        for _ in range(3):
            results.append(torch.zeros_like(rows))
            kernel.add_clipped_(results[-1], rows, Batch(examples(3, 1.0)[None]), None, torch.ones(1))
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])
        assert torch.equal(rows, before)


class Shared(torch.autograd.Function):
    """Divides by the largest number, which under vmap is that of all examples."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Return x over its largest number."""
        return x / x.abs().amax()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the gradient as it is."""
        return gradient

    @staticmethod
    def vmap(info: Any, axes: tuple[int | None], x: Tensor) -> tuple[Tensor, int | None]:
        """Return the same for a batch."""
        return x / x.abs().amax(), axes[0]


def test_a_function_with_a_vmap_rule_is_refused() -> None:
    module, apply = own(lambda m, x: m.flat(Shared.apply(x.flatten(1)))), vars(torch.autograd.Function)["apply"]
    with raises(ScenarioError, "model.per-example", names="Shared has a vmap rule"):
        build_kernel(module, "cross-entropy", SHAPE, kind="vmap")
    assert vars(torch.autograd.Function)["apply"] is apply
