"""*Definition* of a stage: text of the arguments of the stage and of its transform or encoder.

Checkpoints store definitions. When a loader is resumed, they are compared with the definitions of its stages.
"""

import dataclasses
import functools
import hashlib
import inspect
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from gpuaug.core.errors import without_addresses
from gpuaug.stages.base import Stage
from gpuaug.stages.feature import FeatureStage

_MAX_CHARACTERS = 4000
"""Maximum number of characters of a definition. Longer text is truncated."""
_MAX_ELEMENTS = 16
"""Maximum number of elements of a tensor whose values are written. A larger tensor is described by its shape and checksum."""

_PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None))
"""Types of values that are written as their ``repr``."""
_LIBRARY_PREFIXES = ("kornia.", "torchvision.transforms.")
"""Prefixes of modules whose classes are described by all attributes, because attributes need not be named like parameters."""

_CHANGING_ATTRIBUTES = (
    "_params _transform_matrix _transform_matrices _transform_matrix_params _transform_matrix_params_snapshot "
    "_lazy_matrix_args _output_image input_dtype transform_op _valid_ops_for_transform_computation"
)
"""Attributes of Kornia's modules that change in each call."""
_IGNORED_ATTRIBUTES = frozenset({*vars(nn.Module()), *_CHANGING_ATTRIBUTES.split()})
"""Attributes of modules that a definition omits, because they change during a run or do not depend on an argument."""

IGNORED_TYPES = torch.device | torch.Generator | np.random.Generator | np.random.RandomState | random.Random
"""Types of attributes that a definition omits: devices, on which batches do not depend, and generators, which change."""


def definition(stage: Stage) -> str:
    """Return the arguments of a stage as text, equal in all processes. Long text is truncated and ends with its checksum.

    Modules of Kornia and torchvision are described by their attributes, other modules by the attributes that are named like
    parameters of their constructors, a function by its name, its defaults and the plain values in its closure, and the encoder
    of a ``FeatureStage`` by its ``repr``. Code and weights are omitted. A schedule is described by its epochs and stages.

    Args:
        stage: The stage.

    Cost:
        A walk over the modules of the stage, a few microseconds per attribute. Tensors on a GPU are read.
    """
    # First epoch → text. A stage that is not a schedule has only the epoch 0.
    texts = {epoch: _arguments_text(stage_of_epoch) for epoch, stage_of_epoch in stage.by_epoch.items()}
    text = texts[0]
    if len(texts) > 1:  # the epochs come first, because long text is truncated
        text = "\n".join([f"epochs={tuple(texts)}", *(f"from epoch {epoch}, {part}" for epoch, part in texts.items())])
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}… {_checksum(text.encode())}"


def _arguments_text(stage: Stage) -> str:
    """Return the text ``name=value, …`` of the arguments of a stage that is not a schedule."""
    text_of = _Writer(modules_by_repr=isinstance(stage, FeatureStage)).text
    return ", ".join(f"{name}={text_of(value)}" for name, value in arguments(stage).items())


def arguments(stage: Stage) -> dict[str, Any]:
    """Return name → value of the arguments that were passed to a stage, except arguments that do not change batches.

    The names of stages and of decoders are omitted, too: they are other entries of a checkpoint.
    """
    ignored = ("name", "selection", "backend", "captures", "graph_bytes", "threads", "cache", "max_replaced")
    attributes = {name: value for name, value in vars(stage).items() if not name.startswith("_") and name not in ignored}
    named = {"on": stage.selection.on, "into": stage.selection.into, **attributes}
    return {name: value for name, value in named.items() if value is not ...}  # ``...``: not passed


def shown_text(value: Any) -> str:
    """Return the ``repr`` of a value without memory addresses, or its class name if it inherits ``object.__repr__``."""
    if not any("__repr__" in vars(cls) for cls in type(value).__mro__[:-1]):
        return type(value).__qualname__  # without the module name, which is __main__ in the main process but not in workers
    return without_addresses(repr(value))


def _checksum(data: bytes) -> str:
    """Return a hash of ``data`` as 16 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


class _Writer:
    """Converter of values to text.

    A value inside itself, as in a list that contains itself, is written as "…". If an error is raised while a value is read,
    for instance in its ``__repr__``, the value is written as the name of its class.

    Args:
        modules_by_repr: Whether a module is written as its ``repr`` instead of its attributes.
    """

    def __init__(self, *, modules_by_repr: bool) -> None:
        self._modules_by_repr = modules_by_repr
        self._enclosing: list[Any] = []  # values that contain the current value, the outermost first

    def text(self, value: Any) -> str:
        """Return the text of a value of any type."""
        if isinstance(value, Enum):
            return str(value)
        if isinstance(value, np.generic) or type(value) in _PLAIN_TYPES:
            return repr(value.item() if isinstance(value, np.generic) else value)
        if any(value is outer for outer in self._enclosing):
            return "…"
        self._enclosing.append(value)
        try:
            return self._text(value)
        except Exception:
            return type(value).__qualname__
        finally:
            self._enclosing.pop()

    def _text(self, value: Any) -> str:
        """Return the text of a value that is not of ``_PLAIN_TYPES`` and does not contain itself."""
        if isinstance(value, Tensor):
            return _tensor(value)
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, Mapping):
            return f"{{{', '.join(f'{self.text(key)}: {self.text(item)}' for key, item in value.items())}}}"
        if isinstance(value, list | tuple):
            items = list(map(self.text, value))
            return _indented_lines("(", items) if any("=" in item for item in items) else f"({', '.join(items)})"
        if isinstance(value, set | frozenset):
            return f"{{{', '.join(sorted(map(self.text, value)))}}}"  # sorted: the order of a set differs between processes
        if isinstance(value, functools.partial):
            texts = [self.text(argument) for argument in (value.func, *value.args)]
            return f"partial({', '.join([*texts, *self._keyword_texts(value.keywords)])})"
        if isinstance(value, type):
            return value.__qualname__
        if not isinstance(value, nn.Module) and isinstance(getattr(value, "__qualname__", None), str):
            return self._function(value)
        pipeline_and_options = getattr(value, "definition", None)  # a tuple if ``value`` is a result of ``gpuaug.fuse``
        if isinstance(pipeline_and_options, tuple):
            return "\n".join(map(self.text, pipeline_and_options))
        if self._modules_by_repr and isinstance(value, nn.Module):
            return shown_text(value)
        return self._object(value)

    def _array(self, value: Any) -> str:
        """Return the text of a NumPy array: as of a tensor if its elements are numbers, else as of the list of its elements."""
        # In the byte order of the machine, which torch requires.
        array = np.ascontiguousarray(value.astype(value.dtype.newbyteorder("="), copy=False))
        # The bytes of objects are addresses, and long doubles have padding.
        if array.dtype.kind not in "biufc" or array.dtype.char in "gG":
            return f"array(dtype={array.dtype}, {self.text(array.tolist())})"
        return _tensor(torch.as_tensor(array, device="cpu"))

    def _keyword_texts(self, values: Mapping[str, Any]) -> list[str]:
        """Return the texts ``name=value``, in the order of ``values``, but texts of several lines last."""
        return sorted((f"{name}={self.text(value)}" for name, value in values.items()), key=lambda text: "\n" in text)

    def _function(self, value: Any) -> str:
        """Return the text of a function: its name, the object of a bound method, defaults, and plain values in the closure."""
        method_object = getattr(value, "__self__", None)
        arguments = [] if method_object is None or inspect.ismodule(method_object) else [self.text(method_object)]
        function = inspect.unwrap(getattr(value, "__func__", value))
        code = getattr(function, "__code__", None)
        if code is not None:
            parameters = inspect.signature(function).parameters
            defaults = {name: parameter.default for name, parameter in parameters.items()}
            closure = {
                name: getattr(cell, "cell_contents", ...)
                for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)
            }
            arguments += self._keyword_texts({name: value for name, value in defaults.items() if value is not inspect._empty})
            arguments += self._keyword_texts({name: value for name, value in closure.items() if type(value) in _PLAIN_TYPES})
        return f"{value.__qualname__}({', '.join(arguments)})" if arguments else str(value.__qualname__)

    def _object(self, value: Any) -> str:
        """Return the text of an object: its class and attributes, and for a module one line per child."""
        attributes = dict(_attributes(value))
        children = {}
        if isinstance(value, nn.Module):
            children = dict(value.named_children())
            # Buffers of a module without parameters are arguments; of other modules, they are weights or statistics.
            if next(value.parameters(), None) is None:
                attributes |= {name: buffer for name, buffer in value._buffers.items() if buffer is not None}
        elif not attributes:
            return shown_text(value)
        extra = value.extra_repr() if isinstance(value, nn.Module) and not _is_of_library(type(value)) else ""
        parts = [*([extra] if extra else []), *(text for text in self._keyword_texts(attributes) if text not in extra)]
        begin = f"{type(value).__qualname__}({', '.join(parts)}"
        return _indented_lines(begin, [f"({name}): {self.text(child)}" for name, child in children.items()])


def _indented_lines(begin: str, items: Sequence[str]) -> str:
    """Return ``begin``, which ends inside a parenthesis, one indented line per item, and the closing parenthesis."""
    return "\n  ".join([begin, *(item.replace("\n", "\n  ") for item in items)]) + ("\n)" if items else ")")


def _tensor(value: Tensor) -> str:
    """Return the text of a tensor: values if it is small, else shape and checksum; only the shape if it is sparse or meta."""
    if value.layout is not torch.strided or value.is_meta:
        return f"tensor(shape={tuple(value.shape)}, dtype={value.dtype}, layout={value.layout})"
    tensor = (value.dequantize() if value.is_quantized else value).detach().cpu().resolve_conj().resolve_neg()
    if tensor.numel() <= _MAX_ELEMENTS:
        return f"tensor({tensor.tolist()})"
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"tensor(shape={tuple(tensor.shape)}, checksum={_checksum(data)})"


def _is_of_library(cls: type) -> bool:
    """Return whether a class is defined in Kornia or torchvision."""
    return f"{cls.__module__}.".startswith(_LIBRARY_PREFIXES)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the attributes that describe an object.

    Of a dataclass, these are the fields that its constructor takes. Of an object whose class inherits from a class of Kornia or
    torchvision, these are all attributes. Of other objects, these are the attributes named like a parameter of the constructor.
    """
    if dataclasses.is_dataclass(value):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if field.init)
        return
    cls: Any = type(value)
    is_of_library = any(map(_is_of_library, cls.__mro__))
    for name, attribute in without_ignored(value, getattr(value, "__dict__", {})).items():
        if is_of_library or name.strip("_") in _parameters(cls):
            yield name, attribute


def without_ignored(value: Any, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of ``value`` without attributes that change during a run or depend on no argument."""
    is_of_kornia = any(base.__module__.startswith("kornia.") for base in type(value).__mro__)
    return {
        name: attribute
        for name, attribute in attributes.items()
        if name not in _IGNORED_ATTRIBUTES
        and not isinstance(attribute, IGNORED_TYPES)
        # Kornia's modules store the dtype that .to() sets, and distributions that are computed from other attributes.
        and not (is_of_kornia and (name == "dtype" or isinstance(attribute, Distribution)))
    }


@functools.cache
def _parameters(cls: type) -> frozenset[str]:
    """Return the parameters of the constructors of a class and its base classes, without leading and trailing underscores."""
    names: set[str] = set()
    for base in cls.__mro__[:-1]:
        if "__init__" in vars(base):
            with suppress(TypeError, ValueError):  # a constructor need not have a signature
                names.update(inspect.signature(vars(base)["__init__"]).parameters)
    return frozenset(name.strip("_") for name in names) - {"self", "args", "kwargs"}
