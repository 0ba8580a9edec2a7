"""Frozen encoders of a ``FeatureStage``: their modules and names, and their call, which returns a part of their result.

A *leaf* is a value in a result or input that is not a container, such as a tensor.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gpuaug.core import batch as batches
from gpuaug.core.errors import ArgumentError, SelectionError
from gpuaug.core.torchvision_types import has_forward

Encoder = Callable[..., Any]
"""A module, a bound method of a module, or a ``functools.partial`` of one of these."""

Output = str | int | Callable[[Any], Any] | None
"""Selector of a part of an encoder's result: a key or attribute, an index, a dotted path of these, or a function of the result.
``None``: the whole result."""

_COMPRESSED_LAYOUTS = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
"""Layouts of sparse tensors with a method ``values``."""


def module_of(encoder: object) -> nn.Module | None:
    """Return the module that an encoder calls; ``None`` if ``encoder`` is no module, method of a module, or ``partial``."""
    _, callee = _partials(encoder)
    module = callee if isinstance(callee, nn.Module) else getattr(callee, "__self__", None)
    return module if isinstance(module, nn.Module) else None


def _partials(encoder: Any) -> tuple[list[functools.partial[Any]], Any]:
    """Return (``functools.partial`` objects around an encoder, from the outside; module or method inside them)."""
    partials = []
    while isinstance(encoder, functools.partial):
        partials.append(encoder)
        encoder = encoder.func
    return partials, encoder


def is_encoder(value: object) -> bool:
    """Return whether a value is an encoder that can be called. ``nn.ModuleDict`` and other modules without a forward cannot."""
    module = module_of(value)
    return module is not None and (module is not _partials(value)[1] or has_forward(module))


def set_evaluation_mode(module: nn.Module) -> None:
    """Set evaluation mode, as ``module.eval()`` does, also if submodules do not support ``eval()``.

    The mode of a module of ``torch.export`` is fixed when it is exported, and its ``eval`` and ``train`` raise an error.
    """
    try:
        module.eval()
    except NotImplementedError:
        module.training = False
        for child in module.children():
            set_evaluation_mode(child)


def module_code(encoder: object, name: str | None) -> str:
    """Return a Python expression for ``module_of(encoder)``, such as ``"encoder.func.__self__"``, for error messages.

    ``name``: key of the encoder in the mapping of encoders that the user passed; ``None`` if the user passed one encoder.
    """
    partials, callee = _partials(encoder)
    code = ("encoder" if name is None else f"encoder[{name!r}]") + ".func" * len(partials)
    return code if isinstance(callee, nn.Module) else f"{code}.__self__"


def fixed_arguments(encoder: object) -> Iterator[Any]:
    """Yield the arguments that ``functools.partial`` objects add to an encoder."""
    for partial in _partials(encoder)[0]:
        yield from (*partial.args, *partial.keywords.values())


def name_of(encoder: Encoder) -> str:
    """Return the name of an encoder for messages, such as ``"ResNet"``, or ``"AutoencoderKL.encode"`` for a bound method."""
    module = type(module_of(encoder)).__name__
    _, callee = _partials(encoder)
    return module if isinstance(callee, nn.Module) else f"{module}.{getattr(callee, '__name__', 'method')}"


@dataclass(frozen=True, eq=False)
class EncoderCall:
    """Call of one encoder: in evaluation mode, without autograd, under autocast."""

    encoder: Encoder
    module: nn.Module
    """The module that the encoder calls."""
    output: Output
    """Part of the encoder's result to return."""
    argument_names: list[str] | None
    """Names of the encoder's parameters for the inputs, in their order. ``None``: inputs are passed by position."""
    device: str
    """Device type of the encoder, such as ``"cuda"``."""
    autocast: torch.dtype | None
    """dtype of ``torch.autocast``. ``None``: autocast as set in the calling thread."""
    memory_format: torch.memory_format | None
    """Memory format to which four-dimensional inputs are converted. ``None``: they stay unchanged."""

    def __call__(self, *values: Any) -> Any:
        """Return the selected part of the encoder's result, in new containers: an encoder may return the same dict each time.

        Raises:
            SelectionError: If the result has no such part.
        """
        if any(getattr(module, "training", False) for module in self.module.modules()):  # frozen ScriptModules have none
            set_evaluation_mode(self.module)
        values = tuple(_in_memory_format(value, self.memory_format) for value in values)
        # cache_enabled=False, because weights that are converted during a capture would be cached in memory of the CUDA graph.
        autocast = torch.autocast(self.device, dtype=self.autocast, cache_enabled=False) if self.autocast else nullcontext()
        with torch.no_grad(), autocast:
            if self.argument_names is None:
                result = self.encoder(*values)
            else:
                result = self.encoder(**dict(zip(self.argument_names, values, strict=True)))
            part = _part(result, self.output)
        # map_leaves rebuilds every container that holds tensors, because detach() returns new tensors.
        return batches.map_leaves(batches.cached_by_id(_detached), part)

    def run_eagerly(self, *values: Any) -> Any:
        """Run without a CUDA graph. Call ``cuda_graph.copied`` on the result, which may share memory with inputs or weights.

        Raises:
            ArgumentError: If the encoder has written to its input. Not raised for inference tensors, of which it reads copies.
            SelectionError: If the result has no such part.
        """
        inputs = list(batches.tensors(values))
        versions = [_version(tensor) for tensor in inputs]
        result = self(*batches.map_leaves(batches.cached_by_id(_copied_if_inference), values))
        if versions != [_version(tensor) for tensor in inputs]:
            raise ArgumentError(
                f"encoder must not write to its input, which other stages may read, got {name_of(self.encoder)}, which does. "
                "Begin its forward with x = x.clone()."
            )
        return result


def attribute_tensors(encoder: nn.Module) -> list[torch.Tensor]:
    """Return the tensors in plain attributes of an encoder's modules, such as position tables; no parameters or buffers."""
    ignored = {"_parameters", "_buffers", "_modules"}
    tensors: list[torch.Tensor] = []
    for module in encoder.modules():
        for name, value in vars(module).items():
            if name not in ignored:
                with suppress(Exception):  # a configuration object may raise when it is read, or contain itself
                    tensors += batches.tensors(value)
    return tensors


def _part(result: Any, output: Output) -> Any:
    """Return the part of an encoder's result that ``output`` selects.

    Raises:
        SelectionError: If the result has no such part.
    """
    if output is None:
        return result
    if callable(output):
        return output(result)
    if isinstance(output, str) and "." in output and not _has_key(result, output):
        for name in output.split("."):
            result = _part(result, int(name) if name.isdecimal() and not _has_key(result, name) else name)
        return result
    cause: Exception | None = None
    try:
        if isinstance(output, int) or isinstance(result, Mapping):
            return result[output]
        part = getattr(result, str(output))
        if not isinstance(result, torch.Tensor) and not callable(part):  # attributes of a tensor, and methods, are not parts
            return part
    except (LookupError, AttributeError, TypeError) as error:
        cause = error
    names = batches.member_names(result) if batches.is_container(result) else []
    members = f"It has {', '.join(map(repr, names))}." if names else "Leave output out for the whole result."
    if isinstance(output, str) and callable(getattr(type(result), output, None)):
        members = f"To call a method, write output=lambda result: result.{output}()."
    raise SelectionError(
        f"output must name a part of the encoder's result, a {type(result).__name__}, got {output!r}. {members}"
    ) from cause


def _has_key(result: Any, key: str) -> bool:
    """Return whether ``result`` is a mapping with the key ``key``."""
    return isinstance(result, Mapping) and key in result


def _in_memory_format(value: Any, memory_format: torch.memory_format | None) -> Any:
    """Return a dense four-dimensional tensor in ``memory_format``; any other value unchanged."""
    if memory_format is None or not isinstance(value, torch.Tensor) or value.ndim != 4 or not is_dense(value):
        return value
    return value.contiguous(memory_format=memory_format)


def _detached(leaf: Any) -> Any:
    """Return a tensor without its autograd graph; any other value unchanged."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    try:
        return leaf.detach()
    except RuntimeError:  # in inference mode, PyTorch cannot detach nested tensors and wrappers that were created before
        return leaf.clone()


def _copied_if_inference(leaf: Any) -> Any:
    """Return a copy of an inference tensor, which does not count writes; any other value unchanged."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.is_inference() else leaf


def _version(tensor: torch.Tensor) -> tuple[int, bool]:
    """Return (number of writes to a tensor, whether it requires grad). The number is 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version, tensor.requires_grad


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is neither sparse nor nested, so that it has sizes and strides."""
    return tensor.layout is torch.strided and not tensor.is_nested


def value_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors that hold the values of a tensor: the tensor itself if it is dense.

    Indices of sparse tensors and offsets of nested tensors are not included, because a result may share them with the input.
    """
    if tensor.is_nested or tensor.layout in _COMPRESSED_LAYOUTS:
        return [tensor.values()]
    if tensor.layout is torch.sparse_coo:
        return [tensor._values()]
    if is_traceable_wrapper_subclass(tensor):  # such as quantized weights
        return [value for name in tensor.__tensor_flatten__()[0] for value in value_tensors(getattr(tensor, name))]
    return [tensor]
