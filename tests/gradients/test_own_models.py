"""Frozen parts, adapters, tokens, norms, attention and recurrent layers, against single examples."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from gradient_problems import Batch, added
from loop_kernel import LoopKernel
from raising import raises
from torch import Tensor, nn

from flower_privdec.common.errors import ScenarioError
from flower_privdec.gradients import GradientKernel, build_kernel
from flower_privdec.gradients.factored import FactoredKernel
from flower_privdec.gradients.per_example import VmapKernel
from flower_privdec.gradients.proof import Unproved, prove
from flower_privdec.models import check_model, fix_norms, flatten, parameter_count, trained, unflatten
from flower_privdec.tasks.losses import resolve_loss

CLASSES, TOKENS, LENGTH, WIDTH = 3, 11, 6, 8


class Adapted(nn.Module):
    """A frozen linear layer with a trained update of low rank beside it (Hu et al. 2022)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.up(self.down(x))


class BareAdapted(nn.Module):
    """The same with parameters in no layer, as adapters of others have them."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(0.3 * torch.randn(rank, base.in_features))
        self.up = nn.Parameter(0.3 * torch.randn(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class Words(nn.Module):
    """Tokens through an embedding, norms and a linear layer."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm, padding: int | None = None) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(TOKENS, WIDTH, padding_idx=padding), norm(WIDTH)
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.norm(self.table(tokens))
        present = (tokens != 0).unsqueeze(2).to(words)
        return self.head((torch.tanh(self.inner(words)) * present).mean(1))


class Attending(nn.Module):
    """Tokens and their places through a transformer's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.place = nn.Embedding(TOKENS, WIDTH), nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.table(tokens) + self.place).mean(1))


class SelfAttention(nn.Module):
    """Attention as torch has it, over vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Recurrent(nn.Module):
    """An LSTM or a GRU, of which the last output is taken."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.head = kind(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


def frozen_backbone() -> nn.Module:
    """A network of images with BatchNorm whose head alone is trained; it is in training mode."""
    backbone = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.BatchNorm2d(4)
    )
    with torch.no_grad():
        for part in backbone:
            if isinstance(part, nn.BatchNorm2d):
                part.running_mean.normal_()  # type: ignore[union-attr]
                part.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
    return nn.Sequential(
        backbone.requires_grad_(False), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, CLASSES)
    )


def frozen_chain() -> nn.Module:
    """A chain of layers that needs no autograd, whose first and third layers are frozen, and one bias of the second."""
    chain = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.Tanh(),
        nn.Linear(8, CLASSES),
    )  # fmt: skip
    for part in (chain[0], chain[5]):
        part.requires_grad_(False)
    chain[2].bias.requires_grad_(False)  # type: ignore[union-attr]
    return chain


def without_table(module: nn.Module) -> nn.Module:
    module.table.requires_grad_(False)  # type: ignore[union-attr]
    return module


def adapted_words(adapter: Callable[[nn.Linear, int], nn.Module]) -> nn.Module:
    module = Words().requires_grad_(False)
    module.inner = adapter(nn.Linear(WIDTH, WIDTH), 2)  # type: ignore[assignment]
    module.head.requires_grad_(True)
    return module


@dataclass(frozen=True)
class Case:
    """A model, the shape of its inputs, whether these are tokens, and the kernel that it gets."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    kernel: type[GradientKernel]

    @property
    def n_tokens(self) -> int | None:
        return TOKENS if self.shape == (LENGTH,) else None


IMAGES, VECTORS, TEXT = (2, 6, 6), (5, WIDTH), (LENGTH,)
CASES = {
    "embedding and LayerNorm": Case(Words, TEXT, FactoredKernel),
    "embedding with padding": Case(lambda: Words(padding=0), TEXT, FactoredKernel),
    "RMSNorm": Case(lambda: Words(nn.RMSNorm), TEXT, FactoredKernel),
    "LayerNorm over two axes": Case(
        lambda: nn.Sequential(nn.LayerNorm([5, WIDTH]), nn.Flatten(), nn.Linear(40, CLASSES)), VECTORS, FactoredKernel
    ),
    "LayerNorm without bias": Case(
        lambda: nn.Sequential(nn.LayerNorm(WIDTH, bias=False), nn.Flatten(), nn.Linear(40, CLASSES)), VECTORS,
        FactoredKernel,
    ),
    "transformer": Case(Attending, TEXT, VmapKernel),
    "attention": Case(SelfAttention, VECTORS, VmapKernel),
    "LSTM": Case(lambda: Recurrent(nn.LSTM), VECTORS, VmapKernel),
    "GRU": Case(lambda: Recurrent(nn.GRU), VECTORS, VmapKernel),
    "frozen embedding": Case(lambda: without_table(Words()), TEXT, FactoredKernel),
    "frozen embedding of a transformer": Case(lambda: without_table(Attending()), TEXT, VmapKernel),
    "frozen backbone with BatchNorm": Case(frozen_backbone, IMAGES, FactoredKernel),
    "frozen layers of a chain": Case(frozen_chain, IMAGES, FactoredKernel),
    "frozen layers of a stack": Case(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(40, 6).requires_grad_(False), nn.ReLU(), nn.Linear(6, CLASSES)),
        VECTORS, FactoredKernel,
    ),
    "LoRA": Case(lambda: adapted_words(Adapted), TEXT, FactoredKernel),
    "LoRA of bare parameters": Case(lambda: adapted_words(BareAdapted), TEXT, VmapKernel),
}  # fmt: skip


def made(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return CASES[name].make()


def problem(name: str, dtype: torch.dtype, m: int = 2, examples: int = 4) -> tuple[nn.Module, Tensor, Batch]:
    case, module, g = CASES[name], made(name), torch.Generator().manual_seed(3)
    params = flatten(module) + 0.1 * torch.randn(m, parameter_count(module), generator=g)
    x = torch.randn(m, examples, *case.shape, generator=g).to(dtype)
    if case.n_tokens is not None:
        x = torch.randint(0, TOKENS, x.shape, generator=g)
    y = torch.randint(0, CLASSES, (m, examples), generator=g)
    return module, params.to(dtype), Batch(x, y, torch.ones(m, examples, dtype=dtype))


def both(name: str, module: nn.Module) -> tuple[GradientKernel, GradientKernel]:
    case, loss = CASES[name], resolve_loss("cross-entropy")
    return build_kernel(module, loss, case.shape, n_tokens=case.n_tokens), LoopKernel(module, loss, case.n_tokens)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_single_examples(name: str, dtype: torch.dtype, tolerance: float) -> None:
    module, params, batch = problem(name, dtype)
    kernel, loop = both(name, module)
    assert type(kernel) is CASES[name].kernel
    assert kernel.d == parameter_count(module)
    scale = torch.ones(len(params), dtype=dtype)
    sums, expected = (added(each, params, batch, None, scale)[0] for each in (kernel, loop))
    assert ((sums - expected).norm(dim=1) <= tolerance * expected.norm(dim=1)).all()
    small = torch.full_like(scale, 0.05)
    clipped, expected = (added(each, params, batch, small, scale)[0] for each in (kernel, loop))
    assert ((clipped - expected).norm(dim=1) <= 2e-4 * expected.norm(dim=1)).all()
    logits = kernel.logits(params, batch.x[0])
    torch.testing.assert_close(logits, loop.logits(params, batch.x[0]), rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("name", CASES)
def test_an_examples_gradient_depends_on_no_other(name: str) -> None:
    module, params, batch = problem(name, torch.float64, m=1)
    kernel, _ = both(name, module)
    x, last = batch.x.clone(), torch.tensor([[0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    x[:, :3] = 0 if CASES[name].n_tokens else 1e25
    scale = torch.ones(1, dtype=torch.float64)
    alone, beside = (added(kernel, params, Batch(each, batch.y, last), None, scale)[0] for each in (batch.x, x))
    torch.testing.assert_close(beside, alone, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", CASES)
def test_a_clipped_example_adds_at_most_the_clip_norm(name: str) -> None:
    module, params, batch = problem(name, torch.float32, m=1, examples=1)
    kernel, _ = both(name, module)
    clip = torch.tensor([0.01])
    total, norms = added(kernel, params, batch, clip, torch.ones(1))
    assert norms > clip
    assert total.double().norm() <= clip.double()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.n_tokens])
def test_an_example_with_an_unknown_token_counts_as_zero(name: str) -> None:
    module, params, batch = problem(name, torch.float64, m=1)
    kernel, _ = both(name, module)
    batch.x[0, 1, 2], scale = TOKENS, torch.ones(1, dtype=torch.float64)
    without = Batch(batch.x.clamp(max=TOKENS - 1), batch.y, torch.tensor([[1.0, 0.0, 1.0, 1.0]], dtype=torch.float64))
    (total, norms), (expected, _) = (added(kernel, params, each, None, scale) for each in (batch, without))
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-14)
    assert norms[0, 1] == 0


def test_a_frozen_batch_norm_keeps_its_statistics() -> None:
    module = frozen_backbone().train()
    fixed = fix_norms(copy.deepcopy(module))
    x = torch.randn(4, *IMAGES, generator=torch.Generator().manual_seed(0))
    kernel = build_kernel(module, "cross-entropy", IMAGES)
    expected = fixed(x)
    for _ in range(2):
        module.train()
        torch.testing.assert_close(kernel.logits(flatten(module)[None], x)[0], expected)
        batch = Batch(x[None], torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4))
        kernel.add_clipped_(torch.zeros(1, kernel.d), flatten(module)[None], batch, None, torch.ones(1))
    assert torch.equal(module[0][1].running_mean, fixed[0][1].running_mean)  # type: ignore[index]


def test_a_trained_norm_is_refused_with_its_replacement() -> None:
    for part in (nn.BatchNorm2d(2), nn.BatchNorm1d(2, affine=False), nn.SyncBatchNorm(2)):
        with raises(ScenarioError, "model.batch-norm", names="group_norm"):
            check_model(nn.Sequential(part, nn.Linear(2, 2)))
    weight = nn.BatchNorm2d(2)
    weight.bias.requires_grad_(False)
    with raises(ScenarioError, "model.batch-norm", names="group_norm"):
        check_model(weight)
    statistics_of_the_batch = nn.BatchNorm2d(2, track_running_stats=False).requires_grad_(False).eval()
    with raises(ScenarioError, "model.batch-norm", names="group_norm"):
        check_model(nn.Sequential(statistics_of_the_batch, nn.Linear(2, 2)))
    check_model(nn.Sequential(nn.BatchNorm2d(2).requires_grad_(False), nn.Linear(2, 2)))


def test_a_batch_norm_of_the_batch_is_not_proved() -> None:
    norm = nn.BatchNorm1d(WIDTH, track_running_stats=False).requires_grad_(False)
    with raises(Unproved, "proof.fails", names="BatchNorm1d '0'"):
        prove(nn.Sequential(norm, nn.Linear(WIDTH, CLASSES)), (WIDTH,))


def test_only_trained_parameters_are_a_row() -> None:
    module = made("LoRA")
    names = ["inner.down.weight", "inner.up.weight", "head.weight", "head.bias"]
    assert list(trained(module)) == names
    before = {name: value.clone() for name, value in module.state_dict().items()}
    unflatten(module, torch.zeros(parameter_count(module)))
    changed = [name for name, value in module.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == names


def test_a_wholly_frozen_model_is_refused() -> None:
    with raises(ScenarioError, "model.no-parameters", names="all are frozen"):
        check_model(nn.Linear(2, 2).requires_grad_(False))


def test_a_forward_that_changes_a_frozen_weight_is_refused() -> None:
    class Halving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            self.frozen.weight.data.mul_(0.5)
            return self.head(self.frozen(x))

    with raises(ScenarioError, "model.per-example", names="in-place"):
        build_kernel(Halving(), "cross-entropy", (4,), kind="vmap")
