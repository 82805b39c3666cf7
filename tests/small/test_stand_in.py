"""What stands in for torch at a small peer computes what torch does, and what stands in for SciPy what SciPy does."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import networkx
import numpy as np
import pytest
import scipy
import torch
from paths import ROOT
from raising import raises

from flower_privdec import small
from flower_privdec.common import deferred
from flower_privdec.common.errors import ScenarioError
from flower_privdec.experiment.run_key import held_by
from flower_privdec.graph import topology
from flower_privdec.privacy.noise import deployed
from flower_privdec.privacy.noise.philox import PhiloxNoise
from flower_privdec.privacy.noise.plain_philox import PlainPhiloxNoise
from flower_privdec.pushsum.codecs import casts, quantized, sparse
from flower_privdec.rows.keys import seed_keys
from flower_privdec.small import numerics

Use = Callable[[Any, Any, Any, Any], Any]  # of a library, two matrices [4, 6] and places int64 [4]
RANDOM = np.random.default_rng(0)
ONE = RANDOM.normal(size=(4, 6)).astype(np.float32)
OTHER = RANDOM.normal(size=(4, 6)).astype(np.float32)
PLACES = np.array([3, 0, 5, 3])


def _written(t: Any, rows: Any, other: Any) -> Any:
    """Write into parts of rows, which change."""
    rows[1].zero_()
    rows[2] = other[0]
    rows[3, 2:].fill_(7)
    rows[0] += rows[3]
    return rows


def _counted(t: Any, row: Any) -> Any:
    """Write into a single number of a row."""
    row[2].copy_(t.tensor(5.0))
    row[3].add_(row[2])
    return row


USES: dict[str, Use] = {
    "arithmetic": lambda t, a, b, i: (1 - a * b) / (b.abs() + 2) - a**2 + 3 * b,
    "whole numbers": lambda t, a, b, i: i / 2 + i // 2 + i % 3,
    "types": lambda t, a, b, i: a.double() * t.tensor(2.0) + i.to(t.float32).sum() * a,
    "no axes": lambda t, a, b, i: a * t.tensor(0.1, dtype=t.float64),
    "bits": lambda t, a, b, i: (i & 1) | (i << 2) >> 1,
    "compare": lambda t, a, b, i: (a > b) & ~(a < 0) | (b >= 0.5),
    "in place": lambda t, a, b, i: a.clone().mul_(2).sub_(b, alpha=0.5).clamp_(-1, 1).div_(3).add_(1),
    "into a row": lambda t, a, b, i: _written(t, a.clone(), b),
    "a single number": lambda t, a, b, i: _counted(t, a[0].clone()),
    "products": lambda t, a, b, i: t.baddbmm(a[None, :, :1], a[None], b.t()[None]) + t.bmm(a[None], b.t()[None]),
    "reductions": lambda t, a, b, i: t.stack([a.sum(), a.mean(), a.max(), a.min(), a.norm(), t.dot(a[0], b[0])]),
    "along an axis": lambda t, a, b, i: a.sum(1) + a.max(1).values + a.amax(1) + a.logsumexp(1) + a.mean(-1),
    "softmax": lambda t, a, b, i: a.softmax(-1) + a.log_softmax(-1),
    "places": lambda t, a, b, i: a.gather(1, i[:, None]) + a[:, i].sum(1, keepdim=True) + a[a[:, 0] > 0].sum(),
    "scattered": lambda t, a, b, i: a.clone().scatter_add_(-1, i[:, None], b[:, :1]).index_add_(0, i % 4, b),
    "sorted": lambda t, a, b, i: a.sort(-1).values + t.topk(a[0], 6).values,
    "searched": lambda t, a, b, i: t.searchsorted(a.sort(-1).values, b),
    "searched from the right": lambda t, a, b, i: t.searchsorted(b.sort(-1).values, b, right=True),
    "shapes": lambda t, a, b, i: a.t().reshape(3, 8).unflatten(1, (2, 4)).transpose(0, 1).flatten(1),
    "views": lambda t, a, b, i: a[:, 1].unsqueeze(0).expand(2, -1) + a.view(2, 12).narrow(1, 3, 4),
    "parts": lambda t, a, b, i: t.cat([*a.split(3, 1), *a.unbind(1)[0][None, :, None].expand(1, 4, 3)], 0),
    "chosen": lambda t, a, b, i: t.where(a > 0, a, 0.0) + t.where(a > b, a, b) + a.masked_fill(b > 0, -1),
    "functions": lambda t, a, b, i: t.sigmoid(a) + t.relu(b) + t.hypot(a, b) + t.lerp(a, b, 0.3),
    "softshrink": lambda t, a, b, i: t.nn.functional.softshrink(t.cat([a, b * 0, a / 0]), 0.5),
    "softplus": lambda t, a, b, i: t.nn.functional.softplus(50 * a),
    "not finite": lambda t, a, b, i: t.nan_to_num(a / (b * 0), nan=1.0, posinf=2.0, neginf=3.0),
    "bfloat16": lambda t, a, b, i: a.to(t.bfloat16).to(t.float32) + a.to(t.bfloat16).float().sum(),
    "half": lambda t, a, b, i: (a * 1e5).to(t.float16).to(t.float32),
    "bytes": lambda t, a, b, i: a.view(t.int32),
    "norms": lambda t, a, b, i: a / a.norm(dim=1, keepdim=True) + t.linalg.vector_norm(b, dim=0, keepdim=True),
    "how often": lambda t, a, b, i: t.bincount(i, minlength=9) + t.bincount(i, weights=a[:, 0].double(), minlength=9),
    "counted": lambda t, a, b, i: t.arange(6).double() + t.zeros(6) + t.ones_like(a[0]) + t.full((6,), 2.0),
}


def used(library: Any, use: Use) -> tuple[np.ndarray, str]:
    result = use(library, *(library.from_numpy(array.copy()) for array in (ONE, OTHER, PLACES)))
    return np.asarray(result.numpy()), str(result.dtype)


@pytest.mark.parametrize("name", USES)
def test_it_computes_what_torch_does(name: str) -> None:
    ours, our_type = used(small, USES[name])
    theirs, their_type = used(torch, USES[name])
    assert our_type == their_type
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-6)


def test_models_begin_with_the_numbers_of_torch() -> None:
    for seed in (0, 2**40 + 7):
        torch.manual_seed(seed)
        small.default_generator.manual_seed(seed)
        for sizes in ((64, 10), (7, 3), (784, 5)):
            theirs = torch.nn.Linear(*sizes)
            ours = small.nn.Linear(*sizes)
            assert np.array_equal(ours.weight.numpy(), theirs.weight.detach().numpy())
            assert np.array_equal(ours.bias.numpy(), theirs.bias.detach().numpy())
        for sizes in ((5, 7), (40, 32), (3, 3), (2, 1)):
            table = torch.nn.Embedding(*sizes).weight.detach().numpy()
            np.testing.assert_allclose(small.nn.Embedding(*sizes).weight.numpy(), table, atol=1e-6)


def test_a_run_has_one_name_with_torch_and_without() -> None:
    def module(nn: Any) -> Any:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.ReLU(), nn.Identity(), nn.Linear(3, 2, bias=False)
        )

    assert list(held_by(module(small.nn))) == list(held_by(module(torch.nn)))


def test_a_model_too_large_to_count_takes_no_memory() -> None:
    with small.device("meta"):
        layer = small.nn.Linear(10**6, 10**6)
    assert layer.weight.numel() == 10**12


def test_what_is_missing_is_named() -> None:
    with raises(ScenarioError, "small.needs-torch", "fft"):
        small.fft  # noqa: B018
    assert getattr(small, "compile", None) is None


# What only a GPU, another model or torch itself has any use for.
ONLY_TORCH = {
    "experiment/run_key.py": {"torch.backends", "torch.cuda.get_device_name"},
    "common/machine.py": {"torch.cuda.get_device_name", "torch.cuda.mem_get_info"},
    "data/pixels.py": {"torch.contiguous_format"},
    "gradients/protocol.py": {"torch._C", "torch.backends"},
    "models/__init__.py": {"nn.EmbeddingBag"},  # looked for only if torch is there
    "models/residual.py": {"nn.AdaptiveAvgPool2d"},
}


def dotted(node: ast.expr) -> list[str]:
    """Return the names of a.b.c; none if it is something else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else []


def names_of_torch(source: str) -> Iterator[list[str]]:
    """Yield what a file reads from torch, but for annotations."""
    tree = ast.parse(source)
    annotations = [
        part for node in ast.walk(tree) for part in (getattr(node, "annotation", 0), getattr(node, "returns", 0))
    ]
    unread = {id(part) for whole in annotations if isinstance(whole, ast.expr) for part in ast.walk(whole)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in unread:
            names = dotted(node)
            if names and names[0] in ("torch", "nn"):
                yield names


def missing_name(names: list[str]) -> str:
    """Return up to where a name is not here; empty if it is."""
    there: Any = small if names[0] == "torch" else small.nn
    for place, name in enumerate(names[1:], 2):
        if not isinstance(there, small._Part | ModuleType):
            break
        there = getattr(there, name, None)
        if there is None:
            return ".".join(names[:place])
    return ""


def test_every_name_of_torch_on_a_path_is_here() -> None:
    package = ROOT / "flower_privdec"
    for path in sorted(package.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "common.deferred import" not in source:
            continue
        missing = {missing_name(names) for names in names_of_torch(source)} - {""}
        assert missing <= ONLY_TORCH.get(path.relative_to(package).as_posix(), set()), path


def test_a_missing_part_of_a_part_is_named() -> None:
    with raises(ScenarioError, "small.needs-torch", "torch.nn.functional.gelu"):
        small.nn.functional.gelu  # noqa: B018


@pytest.mark.parametrize("name", ["star", "bipartite", "torus"])
def test_textbook_graphs_need_no_networkx(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = {
        "star": networkx.star_graph(11),
        "bipartite": networkx.complete_bipartite_graph(6, 6),
        "torus": networkx.grid_2d_graph(3, 4, periodic=True),
    }
    theirs = topology.undirected(name, graphs[name]).support()
    monkeypatch.setitem(sys.modules, "networkx", None)
    assert np.array_equal(topology.build_topology(name, 12).support(), theirs)


def test_a_drawn_graph_names_networkx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "networkx", None)
    with raises(ScenarioError, "code.not-installed", "networkx"):
        topology.build_topology("random-regular", 12)


def test_the_choice_is_made_before_anything_is_used() -> None:
    assert deferred.torch.float32 is torch.float32  # from here on it is torch
    with pytest.raises(RuntimeError):
        deferred.use_small()
    assert not deferred.is_small()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_keyed_noise_is_the_same(dtype: str) -> None:
    keys = seed_keys(1, range(6))
    peers = np.array([4, 1])
    close = {"float32": 1e-5, "float64": 1e-12}[dtype]
    for d, step, receivers in ((1, 0, None), (127, 1, None), (40_000, 2**32 - 1, np.array([0, 2**32 - 2]))):
        std = [0.5, 2.0]
        theirs = torch.ones(2, d, dtype=getattr(torch, dtype))
        PhiloxNoise(keys).add_(theirs, torch.tensor(std, dtype=theirs.dtype), step, peers, receivers=receivers)
        ours = torch.ones(2, d, dtype=theirs.dtype)
        PlainPhiloxNoise(keys).add_(ours, torch.tensor(std, dtype=theirs.dtype), step, peers, receivers=receivers)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=close)


def test_exact_noise_is_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = deployed.key_stream
    monkeypatch.setattr(deployed, "key_stream", lambda key=None: stream(bytes(32)))
    rows = []
    for library in (torch, small):
        monkeypatch.setattr(deployed, "torch", library)
        for module in (deployed.check_call.__globals__, deployed.all_finite.__globals__):
            monkeypatch.setitem(module, "torch", library)
        out = library.from_numpy(np.tile(ONE, (1, 500)))
        deployed.ExactNoise().add_(out, library.tensor([0.5, 0.0, 1.0, 3.0]), 0, np.arange(4))
        rows.append(out.numpy())
    assert np.array_equal(*rows)


CODECS: dict[str, tuple[ModuleType, Callable[[], Any]]] = {
    "bfloat16": (casts, casts.BFloat16Codec),
    "int8": (quantized, lambda: quantized.Int8Codec(256, False)),
    "int4": (quantized, lambda: quantized.Int4Codec(64, True)),
    "top-k": (sparse, lambda: sparse.TopKCodec(0.25, None, True)),
}


@pytest.mark.parametrize("name", CODECS)
def test_what_torch_encodes_is_decoded_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, build = CODECS[name]
    row = RANDOM.normal(size=700).astype(np.float32)
    codec = build()
    sent = codec.encode(torch.from_numpy(row))
    decoded = codec.decode(sent, torch.from_numpy(row)).numpy()

    for place in {module, quantized}:
        monkeypatch.setattr(place, "torch", small)
    ours = codec.encode(small.from_numpy(row))
    assert np.array_equal(ours.view(small.uint8).numpy(), sent.view(torch.uint8).numpy())
    assert np.array_equal(codec.decode(ours, small.from_numpy(row)).numpy(), decoded)


def test_the_accounts_part_of_scipy_is_as_precise() -> None:
    x = np.concatenate([np.linspace(-20, 30, 4001), np.logspace(-300, 300, 601)])
    theirs = scipy.special.erfcx(x)
    np.testing.assert_allclose(numerics.erfcx(x), theirs, rtol=1e-13)
    x = np.linspace(-37, 37, 2001)
    np.testing.assert_allclose(numerics.ndtr(x), scipy.special.ndtr(x), rtol=1e-12)
    y = -np.logspace(-3, 5, 401)
    np.testing.assert_allclose(numerics.ndtri_exp(y), scipy.special.ndtri_exp(y), rtol=1e-11, atol=1e-13)
    lengths = [*range(1, 600), 999_983, 2**20 + 1]
    assert [numerics.next_fast_len(n) for n in lengths] == [scipy.fft.next_fast_len(n, real=True) for n in lengths]


def test_recursions_and_pooled_slopes_are_those_of_scipy() -> None:
    for count in (2, 512, 513, 5000):
        for fade in (0.3, 0.999999, 1 - 1e-12):
            values = RANDOM.random(count) ** 8
            lower = np.full(count - 1, -fade)
            theirs = scipy.linalg.lapack.dgtsv(lower.copy(), np.ones(count), np.zeros(count - 1), values.copy())[-2]
            ours = numerics.dgtsv(lower, np.ones(count), np.zeros(count - 1), values)[-2]
            np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    for count in (1, 2, 40):
        values = RANDOM.normal(size=count).round(1)
        weights = RANDOM.random(count) + 0.1
        theirs = scipy.optimize.isotonic_regression(values, weights=weights).x
        np.testing.assert_allclose(numerics.isotonic_regression(values, weights=weights).x, theirs, atol=1e-12)
