"""Models a scenario can name; parameters flattened to one row and back.

Each model is a class in a file of this room. To add one, put a file here, or name its class as your own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from flower_privdec.common.catalogue import ACTIVATIONS, INITS, MODELS, ModelKeys
from flower_privdec.common.deferred import is_small, nn, torch
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.fields import section_from
from flower_privdec.common.machine import check_room
from flower_privdec.common.user_code import completing_itself, is_given, load_own, users_code
from flower_privdec.rows.keys import keyed_generator

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
_ACTIVATIONS: dict[str, str] = ACTIVATIONS.bind({"relu": "ReLU", "tanh": "Tanh"})  # the names of layers of torch.nn


def build_model(
    name: str,
    input_shape: Sequence[int],
    n_classes: int,
    *,
    seed: int,
    init: str = "default",
    n_tokens: int | None = None,
    columns: Mapping[str, int] | None = None,
    arguments: Mapping[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """Build a model on the CPU in float32; the same seed gives the same parameters and leaves torch's alone.

    It takes one tensor and returns one: a module of the user's own that takes token columns, or returns logits among
    other outputs, is put into a `layers.one_tensor.OneTensor`. Half precision becomes float32.

    Args:
        name: one of MODELS, or "package.module:factory" for the user's own.
        input_shape: shape of one example, [channels, height, width] or [features].
        n_classes: number of outputs.
        seed: keys the initial parameters.
        init: "default" is torch's, "zeros" makes every parameter 0.
        n_tokens: inputs are whole numbers 0..n_tokens-1; None if they are real numbers.
        columns: how many values each argument of the user's own module has, of which a token is packed; None if it
            takes the tensor itself.
        arguments: what the user's own factory is called with.
        options: a named model's own, such as hidden=[100] for mlp.

    Raises:
        ScenarioError: an unknown name or option, an input the model cannot take, or see check_model.
    """
    from flower_privdec.models.layers.one_tensor import OneTensor, logits_of

    INITS.check(init, "model.init")
    shape = tuple(int(size) for size in input_shape)
    if not shape or min(shape) < 1 or n_classes < 1:
        raise ScenarioError(f"input_shape={list(shape)} and n_classes={n_classes} must be positive", code="model.shape")
    where = _place(name)
    is_own = ":" in name
    if is_own:
        factory = _own(name, shape, n_classes, n_tokens, arguments or {})
    else:
        factory = _named(name, shape, n_classes, n_tokens, columns, options)

        check_size(factory, where)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(keyed_generator(seed, "model").integers(2**63)))
        module = factory()
        check_model(module, where)
        fix_norms(module)
        if is_own and columns is not None:
            module = OneTensor(module, columns)
        output = _tried(_in_float32(module), where, shape, n_tokens, columns)  # lazy layers draw their parameters here
        if is_own and not isinstance(output, torch.Tensor):
            module = OneTensor(module, None)
            output = logits_of(output)
        _check_output(output, where, n_classes)
        if is_own:
            _check_examples_apart(module, where, shape, n_tokens)
        for path, parameter in module.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                raise ScenarioError(f"{where} begins with NaN or infinity in {path}: mend how it is made")
    if init == "zeros":
        with torch.no_grad():
            for parameter in trained(module).values():
                parameter.zero_()
    return module


def check_size(factory: Callable[[], nn.Module], where: str) -> None:
    """Refuse a model whose parameters do not fit into memory, before they are made.

    On the device `meta` a parameter has a shape and no numbers. Lazy layers have no shape before they see an input, so
    a model with some of them is not counted.

    Raises:
        ScenarioError: with the number of parameters.
    """
    try:
        with torch.device("meta"):
            module = factory()
            if any(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in module.parameters()):
                return
            count = parameter_count(module)
    except RuntimeError as error:  # more than a size can count
        raise ScenarioError(f"{where} has more parameters than can be counted; use a smaller one") from error
    check_room(4 * count, f"{where}: one copy of its {count:,} parameters", "use a smaller model")


def check_model(module: nn.Module, where: str = "model") -> None:
    """Refuse a model whose gradient for one example depends on the others or on unkeyed random numbers.

    Raises:
        ScenarioError: batch normalisation or running statistics that are trained, dropout, or nothing to train.
    """
    if not isinstance(module, nn.Module):
        raise ScenarioError(f"{where} must be a torch.nn.Module, not {type(module).__name__}", code="model.no-module")

    for path, part in module.named_modules():
        kind = type(part).__name__
        if keeps_statistics(part) and not is_constant_norm(part):
            raise ScenarioError(
                f"{where} trains {kind} ({path}), which mixes the examples of a batch, so that none can be clipped "
                "alone: put GroupNorm in its place by flower_privdec.training_loop.group_norm(model), or freeze it by "
                "requires_grad_(False) (without weights: eval()), so that its statistics stay as they are",
                code="model.batch-norm",
            )
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 and part.training:
            raise ScenarioError(
                f"{where} uses {kind} ({path}), whose random numbers are not keyed by peer and round: leave it out, or "
                "call its eval()",
                code="model.random",
            )

    parameters = trained(module)
    if not parameters:
        frozen = ""
        if list(module.parameters()):
            frozen = " (all are frozen: call requires_grad_() of some)"
        raise ScenarioError(f"{where} has no parameters to train{frozen}", code="model.no-parameters")

    for path, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise ScenarioError(
                f"{where} has a parameter of {parameter.dtype} ({path}): it must be of floating numbers"
            )


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, those that require gradients, in the order of named_parameters.

    Only they are rows: clipped, noised and sent. The others are public constants, the same at all peers.

    Examples:
        >>> module = nn.Sequential(nn.Linear(3, 2).requires_grad_(False), nn.Linear(2, 1))
        >>> list(trained(module)), parameter_count(module)
        (['1.weight', '1.bias'], 3)
    """
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def padding_rows(module: nn.Module) -> dict[str, int]:
    """Return the row of each embedding's table that is for padding, by the table's name among trained parameters.

    torch never gives the row of `padding_idx` a gradient, so that it stays as it was made. A table that another layer
    has too, such as the head of a language model, is not among them: as that layer's weight the row has a gradient.
    """
    if is_small():  # whose embeddings have no padding
        return {}

    holders: dict[int, list[nn.Module]] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(part)

    rows = {}
    for name, parameter in trained(module).items():
        parts = holders[id(parameter)]
        paddings = {getattr(part, "padding_idx", None) for part in parts}
        if all(isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in parts) and len(paddings) == 1:
            (padding,) = paddings
            if padding is not None:
                rows[name] = int(padding)
    return rows


def keeps_statistics(part: nn.Module) -> bool:
    """Return whether a layer is a BatchNorm of any kind, or keeps running statistics as one does."""
    if isinstance(part, nn.modules.instancenorm._InstanceNorm):
        return bool(part.track_running_stats)
    return isinstance(part, nn.modules.batchnorm._BatchNorm)


def is_constant_norm(part: nn.Module) -> bool:
    """Return whether a layer keeps statistics that are constants: its weights are frozen, or there are none.

    One without weights has to be in eval mode: otherwise it would be trained through its statistics.
    """
    if not keeps_statistics(part) or getattr(part, "running_mean", None) is None:
        return False
    parameters = list(part.parameters(recurse=False))
    if parameters:
        return not any(p.requires_grad for p in parameters)
    return not part.training


Module = TypeVar("Module", bound="nn.Module")


def fix_norms(module: Module) -> Module:
    """Put each norm whose statistics are constants into eval mode, in place, and return the module."""
    for part in module.modules():
        if is_constant_norm(part):
            part.eval()
    return module


def parameter_count(module: nn.Module) -> int:
    """Return d, the number of parameters that are trained."""
    return sum(parameter.numel() for parameter in trained(module).values())


def flatten(module: nn.Module) -> Tensor:
    """Return a copy of the trained parameters as one row [d], in the order of named_parameters.

    Examples:
        >>> module = nn.Linear(3, 2)
        >>> row = flatten(module)
        >>> row.shape
        torch.Size([8])
        >>> unflatten(module, torch.zeros(8)).weight.abs().sum().item()
        0.0
    """
    return torch.cat([parameter.detach().reshape(-1) for parameter in trained(module).values()])


def unflatten(module: nn.Module, row: Tensor) -> nn.Module:
    """Copy one row [d] into the module's trained parameters and return the module.

    Raises:
        ScenarioError: a row of another length.
    """
    d = parameter_count(module)
    if row.shape != (d,):
        raise ScenarioError(
            f"a row of shape {list(row.shape)} must be [{d}], the number of trained parameters", code="model.row"
        )
    with torch.no_grad():
        parameters = list(trained(module).values())
        parts = torch.split(row, [parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.copy_(part.view_as(parameter))
    return module


class Model:
    """A model that a scenario can name: a class with its name, its line and its keys, which builds a module.

    It takes part as a built-in if its file lies in `flower_privdec/models`, and as a user's own by its module.

    Args:
        section: its keys.

    Attributes:
        name: what a scenario calls it.
        line: what `privdec list` says of it.
        Section: declares its keys.
        takes_tokens: whether its inputs are whole numbers, of which there are n_tokens.
    """

    name: str = ""
    line: str = ""
    Section: ClassVar[type[ModelKeys]] = ModelKeys
    takes_tokens: ClassVar[bool] = False

    def __init__(self, section: Any) -> None:
        self.section = section

    def build(self, shape: Shape, n_outputs: int, n_tokens: int | None) -> nn.Module:
        """Return the module, with the parameters that torch draws.

        Args:
            shape: the shape of one example, [channels, height, width] or [features].
            n_outputs: how many numbers it turns an example into.
            n_tokens: inputs are whole numbers 0..n_tokens-1; None if they are real numbers.
        """
        raise NotImplementedError(f"{type(self).__name__} must define build(self, shape, n_outputs, n_tokens)")


def dense_layers(size: int, hidden: Sequence[int], n_outputs: int, activation: str) -> list[nn.Module]:
    """Return linear layers from `size` numbers through the hidden widths to the outputs, an activation between two."""
    layers: list[nn.Module] = []
    for width in hidden:
        if width < 1:
            raise ScenarioError(f"model.hidden={list(hidden)} must be positive widths", code="model.widths")
        layers += [nn.Linear(size, width), activation_layer(activation)]
        size = width
    return [*layers, nn.Linear(size, n_outputs)]


def activation_layer(name: str) -> nn.Module:
    """Return a layer of the activation of a name."""
    ACTIVATIONS.check(name, "model.activation")
    layer: nn.Module = getattr(nn, _ACTIVATIONS[name])()
    return layer


def image_shape(shape: Shape) -> Shape:
    """Return the shape of an image; refuse examples that are not images."""
    if len(shape) != 3:
        raise ScenarioError(
            f"model.name: a convolutional model takes images [channels, height, width], and examples here are "
            f"{list(shape)}: use linear or mlp",
            code="model.no-images",
        )
    return shape


def _named(
    name: str,
    shape: Shape,
    n_classes: int,
    n_tokens: int | None,
    columns: Mapping[str, int] | None,
    options: dict[str, Any],
) -> Callable[[], nn.Module]:
    MODELS.check(name, "model.name")
    part: Any = MODELS[name]
    if n_tokens is None and part.takes_tokens:
        raise ScenarioError(
            f"model.name={name!r} is for tokens: use linear or mlp for numbers, or give data.vocabulary",
            code="model.tokens",
        )
    if columns is not None and len(columns) > 1:
        raise ScenarioError(
            f"model.name={name!r} takes tokens without other columns, and data.columns has {', '.join(columns)}: leave "
            "one, or use your own module",
            code="model.columns",
        )
    if n_tokens is not None and not part.takes_tokens:
        raise ScenarioError(
            f"model.name={name!r} is for numbers and the data are tokens: use text, or your own module",
            code="model.tokens",
        )

    valid = part.Section.model_fields
    for option in options:
        if option not in valid:
            raise ScenarioError(
                f"model.{option} is not an option of {name}: its options are {', '.join(valid)}", code="model.option"
            )

    # Values are not validated again: those of a scenario were, and a model checks what it takes from Python.
    model: Model = part(part.Section.model_construct(**options))
    return partial(model.build, shape, n_classes, n_tokens)


def _place(name: str) -> str:
    """Return how errors call a model: what was given in Python has no name that its author knows."""
    if is_given(name):
        return "model"
    key = "module" if ":" in name else "name"
    return f"model.{key}={name!r}"


def _own(
    target: str, shape: Shape, n_outputs: int, n_tokens: int | None, arguments: Mapping[str, Any]
) -> Callable[[], nn.Module]:
    part = load_own(target, "model.module", must_be="a function that returns a torch.nn.Module")

    def build() -> nn.Module:
        place = _place(target)
        failing = users_code(f"{place} could not be built with {dict(arguments)}", code="code.fails")
        with failing, completing_itself(target):
            module: nn.Module
            if isinstance(part, type) and issubclass(part, Model):
                section = section_from(part.Section, arguments, place)
                module = part(section).build(shape, n_outputs, n_tokens)
            else:
                module = part(**arguments)
        return module

    return build


def _in_float32(module: nn.Module) -> nn.Module:
    """Turn parameters and buffers of half precision into float32, in place, which is exact, and return the module."""
    half = (torch.float16, torch.bfloat16)
    module._apply(lambda tensor: tensor.float() if tensor.dtype in half else tensor)
    return module


def _tried(module: nn.Module, where: str, shape: Shape, n_tokens: int | None, columns: Mapping[str, int] | None) -> Any:
    """Return a module's outputs for two examples: of zeros, or of the least and of the largest token.

    Raises:
        ScenarioError: it fails on them.
    """
    inputs = torch.zeros(2, *shape)
    what = "inputs"
    remedy = ""
    kinds = {str(value.dtype).removeprefix("torch.") for value in module.parameters() if value.dtype != torch.float32}
    if n_tokens is not None:
        inputs = inputs.long()
        inputs[1] = n_tokens - 1
        what = f"tokens 0 to {n_tokens - 1}"
    elif kinds:
        remedy = f" in float32; its parameters are {', '.join(sorted(kinds))}: build it in float32"
    if columns is not None:
        what = ", ".join(f"{name} 0 to {size - 1}" for name, size in columns.items())
        remedy = " (data.columns has the arguments of its forward, and how many values each has)"

    taken = users_code(f"{where} cannot take {what} of shape {list(shape)}{remedy}", code="model.input")
    with taken, torch.enable_grad():
        return module(inputs)


def _check_examples_apart(module: nn.Module, where: str, shape: Shape, n_tokens: int | None) -> None:
    """Refuse a module whose output for an example depends on the others of its batch.

    Privacy: training takes each example alone, so no ε depends on it; the model would be another than its author's.
    """
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randn(4, *shape, generator=generator)
    if n_tokens is not None:
        x = torch.randint(n_tokens, (4, *shape), generator=generator)
    with torch.no_grad(), users_code(f"{where} cannot take 4 examples and one", code="model.input"):
        together = module(x)
        again = module(x)
        ones = [module(example[None]) for example in x]

    shapes = [list(output.shape) for output in (together, ones[0])]
    if shapes[0][0] != 4 or shapes[1][0] != 1:
        raise ScenarioError(
            f"{where} turns 4 examples into {shapes[0]} and one into {shapes[1]}: the first axis must be that of the "
            "examples; take a transpose out of it",
            code="model.output",
        )
    alone = torch.cat(ones)
    if torch.equal(together, again) and not torch.allclose(together, alone, rtol=1e-3, atol=1e-5, equal_nan=True):
        raise ScenarioError(
            f"{where} gives an example different outputs in a batch than by itself: no layer may mix the examples of a "
            "batch, as Softmax(0), mean(0) or cumsum(0) do; take another dimension",
            code="model.mixes-examples",
        )


def _check_output(output: Any, where: str, n_classes: int) -> None:
    if not isinstance(output, torch.Tensor):
        raise ScenarioError(
            f"{where} returns {type(output).__name__} for 2 examples: it must be one tensor [2, {n_classes}], or have "
            "one as its logits",
            code="model.output",
        )

    if not output.is_floating_point():
        raise ScenarioError(f"{where} returns {output.dtype}: it must be floating numbers, through which gradients go")
    if output.shape != (2, n_classes):
        raise ScenarioError(
            f"{where} turns 2 examples into {list(output.shape)}: it must be [2, {n_classes}]", code="model.output"
        )

    if not output.requires_grad:
        raise ScenarioError(f"{where} returns what depends on no parameter: is there a detach() or no_grad() in it?")
