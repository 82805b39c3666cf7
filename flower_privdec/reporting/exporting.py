"""Trained models for programs that know nothing of this package, each beside a card that says what it is.

A model is written in the format of its file's ending, read back, and compared with the module on made-up inputs of
another batch size than it was written with. So a file that exists computes what the module does.

    .safetensors, .pt    the state dict, without code
    .torchscript, .pt2   the module with its code, for `torch.jit.load` and `torch.export.load`
    .onnx                the module for any ONNX runtime; needs the extra `onnx`

The card is `reporting/model_card.py`'s, and may be published with the model.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn

from flower_privdec.common.errors import ScenarioError, option
from flower_privdec.common.files import write_atomically
from flower_privdec.common.formatting import one_line
from flower_privdec.common.user_code import require
from flower_privdec.experiment.recorder import SCENARIO, TRAINED
from flower_privdec.models.layers.one_tensor import logits_of, unpacked
from flower_privdec.reporting.model_card import HEADER, ModelFacts, model_card
from flower_privdec.reporting.run_folder import Result
from flower_privdec.reporting.trained_models import LoadedModel, load_model

TRACED_ROWS = 2
CHECKED_ROWS = 5  # another number than was traced: a batch size that became a constant shows itself
CLOSE = {torch.float32: 1e-4, torch.float64: 1e-9}  # exporters may reorder sums


class ExportedModel(NamedTuple):
    """The paths of an exported model and of its card."""

    model: Path
    card: Path


Inputs = tuple[Tensor, ...]  # one, or one for each argument of a model of tokenized texts
Computes = Callable[..., Tensor]


class Called(nn.Module):
    """A model called with its inputs one after the other, of which several are given by their names.

    Attributes:
        model: the model.
        names: of its inputs.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.names = tuple(names)

    @classmethod
    def of(cls, model: LoadedModel) -> Called:
        """Return a trained model with the names of its inputs, `input` if it has one only."""
        return cls(model.module, tuple(model.columns or ("input",))).eval()

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the model's outputs; its logits if it returns several."""
        if self.names == ("input",):
            outputs: Tensor = logits_of(self.model(*inputs))
        else:
            outputs = logits_of(self.model(**dict(zip(self.names, inputs, strict=True))))
        return outputs


# --- formats: each writes a file, and returns what the file computes ---


def _write_safetensors(called: Called, path: Path, inputs: Inputs) -> Computes:
    """Write the state dict as safetensors."""
    state = {name: tensor.contiguous().clone() for name, tensor in called.model.state_dict().items()}
    safetensors.torch.save_file(state, path)
    return _filled(called, safetensors.torch.load_file(path))


def _write_state_dict(called: Called, path: Path, inputs: Inputs) -> Computes:
    """Write the state dict by `torch.save`."""
    torch.save(dict(called.model.state_dict()), path)
    return _filled(called, torch.load(path, weights_only=True))


def _filled(called: Called, state: dict[str, Tensor]) -> Computes:
    # Buffers that a state dict leaves out are made anew by who builds the module.
    tensors = dict(called.named_buffers())
    tensors |= {f"model.{name}": tensor for name, tensor in state.items()}

    def compute(*inputs: Tensor) -> Tensor:
        # A state dict has tied parameters under each of their names, which functional_call refuses to tie again.
        outputs: Tensor = torch.func.functional_call(called, tensors, inputs, tie_weights=False, strict=True)
        return outputs

    return compute


def _write_torchscript(called: Called, path: Path, inputs: Inputs) -> Computes:
    """Write the module as TorchScript."""
    with warnings.catch_warnings():
        # PyTorch recommends torch.export, which .pt2 is. Who asks for TorchScript has a program that reads it.
        warnings.simplefilter("ignore")
        torch.jit.trace(called, inputs).save(str(path))
        loaded: Computes = torch.jit.load(str(path))
    return loaded


def _any_batch_size(inputs: Inputs) -> tuple[tuple[dict[int, Any], ...]]:
    return (tuple({0: torch.export.Dim.DYNAMIC} for _ in inputs),)


def _write_program(called: Called, path: Path, inputs: Inputs) -> Computes:
    """Write the module as a program of `torch.export`."""
    torch.export.save(torch.export.export(called, inputs, dynamic_shapes=_any_batch_size(inputs)), path)
    loaded: Computes = torch.export.load(path).module()
    return loaded


def _write_onnx(called: Called, path: Path, inputs: Inputs) -> Computes:
    """Write the module as ONNX, with one output, `output`, and its inputs by name."""
    remedy = "pip install 'flower-privdec[onnx]', or end the path in .pt2 or .torchscript"
    require("onnxscript", "an ONNX file", remedy)
    reference = require("onnx.reference", "an ONNX file", remedy)

    program = torch.onnx.export(
        called,
        inputs,
        dynamic_shapes=_any_batch_size(inputs),
        input_names=list(called.names),
        output_names=["output"],
        dynamo=True,
        verbose=False,
    )
    assert program is not None  # it is None only if a file is given
    program.save(path)

    evaluator = reference.ReferenceEvaluator(str(path))

    def compute(*inputs: Tensor) -> Tensor:
        arrays = [tensor.numpy() for tensor in inputs]
        (outputs,) = evaluator.run(["output"], dict(zip(called.names, arrays, strict=True)))
        return torch.from_numpy(outputs)

    return compute


FORMATS: dict[str, tuple[str, Callable[[Called, Path, Inputs], Computes]]] = {
    ".safetensors": ("state dict, safetensors", _write_safetensors),
    ".pt": ("state dict, torch.load(path, weights_only=True)", _write_state_dict),
    ".torchscript": ("TorchScript, torch.jit.load(path)", _write_torchscript),
    ".pt2": ("program, torch.export.load(path).module()", _write_program),
    ".onnx": ("ONNX, from input to output", _write_onnx),
}


def export(run: Result, out: Path, peer: int | None = None, into: nn.Module | None = None) -> ExportedModel:
    """Write a trained model of a run and its card; both, or neither.

    Args:
        out: whose ending says the format.
        peer, into: as of `load_model`.

    Raises:
        ScenarioError: the format is not known or not installed, or cannot hold the module; there is no such model; or
            nothing can be written.
    """
    ending = out.suffix.lower()
    if ending not in FORMATS:
        raise ScenarioError(
            f"{option('out', out)}: must end in one of {', '.join(FORMATS)}; rename it", code="export.suffix"
        )
    model = load_model(run, peer, into)
    # A name of its own: two exports to one path may run at once, and each compares what it wrote itself.
    part = out.with_name(f".{out.stem}.{secrets.token_hex(6)}.part{ending}")
    card_path = card_of(out)
    try:
        _check_free(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            outputs = _write_checked(model, part, ending)
            card = model_card(run, _facts(model, outputs, out))
            write_atomically(card_path, card.encode(), public=True)
            part.replace(out)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise ScenarioError(
            f"{option('out', out)}: cannot be written ({error.strerror or one_line(error)}); give another path",
            code="export.unwritable",
        ) from error
    return ExportedModel(out, card_path)


def card_of(out: Path) -> Path:
    """Return the path of the card of an exported model: one for each file, whose ending is in it."""
    return out.with_name(f"{out.name}-card.md")


def _check_free(out: Path) -> None:
    """Refuse to write over a run's own models, a folder, or a text that is no card.

    Raises:
        ScenarioError: see above. Earlier exports are written over.
    """
    is_in_run = (out.parent / SCENARIO).is_file()
    if is_in_run and out.name.lower() == TRAINED:
        raise ScenarioError(
            f"{option('out', out)}: is where the run keeps the models of all its peers; give another name",
            code="export.exists",
        )
    if out.is_dir():
        raise ScenarioError(f"{option('out', out)}: is a folder; give another path", code="export.unwritable")
    card = card_of(out)
    if card.is_file() and not card.read_bytes().startswith(HEADER.encode()):
        raise ScenarioError(f"{card}: exists, and is no card of a model; rename it", code="export.exists")


def _write_checked(model: LoadedModel, part: Path, ending: str) -> Tensor:
    """Write a model, and compare what the file computes with what the module does.

    Returns:
        The module's outputs for some inputs.
    """
    _, write = FORMATS[ending]
    dtype = next(model.module.parameters()).dtype
    called = Called.of(model)
    tried = made_up(model, CHECKED_ROWS, dtype)
    remedy = "end the path in .safetensors, which holds the parameters of any module"
    if ending == ".safetensors":
        remedy = "in Python, `load_run(folder).model()` returns the module"
    with torch.no_grad():
        expected: Tensor = called(*tried)
        try:
            found = write(called, part, made_up(model, TRACED_ROWS, dtype))(*tried)
        except (ScenarioError, OSError):
            raise
        except Exception as error:  # torch's exporters raise errors of many kinds
            raise ScenarioError(
                f"the model cannot be written as {ending} ({one_line(error)}); {remedy}", code="export.failed"
            ) from error

    close = CLOSE[dtype]
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=close, atol=close, equal_nan=True):
        raise ScenarioError(
            f"the model as {ending} computes something else than the module, for other inputs than those it was "
            f"traced with; {remedy}",
            code="export.differs",
        )
    return expected


def made_up(model: LoadedModel, rows: int, dtype: torch.dtype) -> Inputs:
    """Return made-up inputs for a model, [rows, *input shape]."""
    generator = torch.Generator().manual_seed(rows)
    size = (rows, *model.input_shape)
    if model.n_tokens is None:
        return (torch.rand(size, generator=generator, dtype=dtype),)
    tokens = torch.randint(model.n_tokens, size, generator=generator)
    if model.columns is None:
        return (tokens,)
    return tuple(unpacked(tokens, model.columns).values())


def _facts(model: LoadedModel, outputs: Tensor, out: Path) -> ModelFacts:
    """Return what the card says about the file."""
    title, _ = FORMATS[out.suffix.lower()]
    shape = _batch_of(model.input_shape)
    if model.columns is not None:
        inputs = "; ".join(f"{name}: {_whole_numbers(size)}, {shape}" for name, size in model.columns.items())
    elif model.n_tokens is not None:
        inputs = f"{_whole_numbers(model.n_tokens)}, {shape}"
    else:
        inputs = f"real numbers, {shape}"
    return ModelFacts(
        whose=model.title,
        file=f"{out.name} ({title})",
        inputs=inputs,
        outputs=f"real numbers, {_batch_of(outputs.shape[1:])}",
        n_parameters=sum(parameter.numel() for parameter in model.module.parameters()),
    )


def _whole_numbers(count: int) -> str:
    return f"whole numbers 0 to {count - 1}"


def _batch_of(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, ('batch', *shape)))}]"
