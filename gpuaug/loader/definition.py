"""Definition of a stage as text: the arguments of the stage and of its pipeline, the same in each process."""

import dataclasses
import dis
import functools
import hashlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from gpuaug.stages.base import Stage
from gpuaug.stages.feature import FeatureStage

_MOST_TEXT = 4000  # characters of a definition that a state keeps
_MOST_VALUES = 16  # numbers of a tensor that are written out
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""The address in the ``repr`` of an object."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LIBRARIES = ("kornia.", "torchvision.transforms.")
"""Modules whose classes are described by all attributes; they may keep an argument under another name than its parameter's."""

_STATE = frozenset(
    {
        *vars(nn.Module()),
        *(
            "_params",
            "_transform_matrix",
            "_transform_matrices",
            "_transform_matrix_params",
            "_transform_matrix_params_snapshot",
        ),
        *("_lazy_matrix_args", "_output_image", "input_dtype", "transform_op", "_valid_ops_for_transform_computation"),
    }
)
"""Attributes of modules that a run changes, or that no argument decides."""

_NO_ARGUMENTS = torch.device | torch.Generator | np.random.Generator
"""Types of attributes that are left out: the place of a module, and states that a run changes."""


def definition(stage: Stage) -> str:
    """Arguments of a stage as text, the same in each process. Long text is cut and ends with its checksum.

    A pipeline is described by all that its modules were made with. Of a function the name and the values that it was given are
    part of it, not its code. The encoder of a ``FeatureStage`` is described by its ``repr``, and weights of modules by nothing.

    Cost:
        A walk over the modules of the stage, some microseconds for each attribute. Tensors on a GPU are read.
    """
    ignored = (
        "name",
        "selection",
        "backend",
        "captures",
        "graph_bytes",
        "threads",
    )  # these change no batch, or are compared by themselves
    own = {name: value for name, value in vars(stage).items() if not name.startswith("_") and name not in ignored}
    arguments = {"on": stage.selection.on, "into": stage.selection.into, **own}
    write = _Writer(modules_by_repr=isinstance(stage, FeatureStage)).text
    text = ", ".join(f"{name}={write(value)}" for name, value in arguments.items() if value is not ...)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}… {_checksum(text.encode())}"


def shown_text(value: Any) -> str:
    """The ``repr`` of a value without addresses; the name of its class if it has no ``repr`` of its own."""
    if not any("__repr__" in vars(kind) for kind in type(value).__mro__[:-1]):
        return type(value).__qualname__  # without its module, which is called __main__ where it is the program
    return ADDRESS.sub("", repr(value))


def _checksum(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


class _Writer:
    """Writes values as text. An object within itself is written once.

    Args:
        modules_by_repr: Whether the ``repr`` of a module is all that is written of it.
    """

    def __init__(self, *, modules_by_repr: bool) -> None:
        self._modules_by_repr = modules_by_repr
        self._open: list[Any] = []

    def text(self, value: Any) -> str:
        """The text of any value."""
        if isinstance(value, Enum | np.generic) or type(value) in _PLAIN:
            return str(value) if isinstance(value, Enum) else repr(value.item() if isinstance(value, np.generic) else value)
        if any(value is other for other in self._open):
            return "…"
        self._open.append(value)
        try:
            return self._text(value)
        finally:
            self._open.pop()

    def _text(self, value: Any) -> str:
        if isinstance(value, Tensor | np.ndarray):
            return _array(value)
        if isinstance(value, Mapping):
            return f"{{{', '.join(f'{self.text(key)}: {self.text(each)}' for key, each in value.items())}}}"
        if isinstance(value, list | tuple):
            items = list(map(self.text, value))
            return _on_lines("(", items) if any("=" in item for item in items) else f"({', '.join(items)})"
        if isinstance(value, set | frozenset):
            return f"{{{', '.join(sorted(map(self.text, value)))}}}"  # in one order in all processes
        if isinstance(value, functools.partial):
            arguments = [self.text(each) for each in (value.func, *value.args)]
            return f"partial({', '.join([*arguments, *self._named(value.keywords)])})"
        if isinstance(value, type):
            return value.__qualname__
        if not isinstance(value, nn.Module) and isinstance(getattr(value, "__qualname__", None), str):
            return self._function(value)
        described = getattr(value, "definition", None)  # of what fuse returns: the pipeline and the options
        if isinstance(described, tuple):
            return "\n".join(map(self.text, described))
        if self._modules_by_repr and isinstance(value, nn.Module):
            return shown_text(value)
        return self._object(value)

    def _named(self, values: Mapping[str, Any]) -> list[str]:
        """Arguments as text. Those on several lines come last."""
        return sorted((f"{name}={self.text(value)}" for name, value in values.items()), key=lambda text: "\n" in text)

    def _function(self, value: Any) -> str:
        """A function by its name, and the values that it was given: its object, defaults, and what it closes over."""
        held = getattr(value, "__self__", None)
        given = [] if held is None or inspect.ismodule(held) else [self.text(held)]
        function = inspect.unwrap(getattr(value, "__func__", value))
        code = getattr(function, "__code__", None)
        if code is not None:
            names = code.co_varnames[: code.co_argcount]
            defaults = function.__defaults__ or ()
            given += self._named(dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)))
            given += self._named(function.__kwdefaults__ or {})
            written = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_DEREF"}
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
                found = getattr(cell, "cell_contents", ...)
                if type(found) in _PLAIN and name not in written:
                    given.append(f"{name}={self.text(found)}")
        return f"{value.__qualname__}({', '.join(given)})" if given else str(value.__qualname__)

    def _object(self, value: Any) -> str:
        attributes = dict(_attributes(value))
        children = {}
        if isinstance(value, nn.Module):
            children = dict(value.named_children())
            if next(value.parameters(), None) is None:  # else they are weights, or statistics beside them
                attributes |= {name: each for name, each in value._buffers.items() if each is not None}
        elif not attributes:
            return shown_text(value)
        extra = value.extra_repr() if isinstance(value, nn.Module) and not _is_known(type(value)) else ""
        parts = [*([extra] if extra else []), *(each for each in self._named(attributes) if each not in extra)]
        begin = f"{type(value).__qualname__}({', '.join(parts)}"
        return _on_lines(begin, [f"({name}): {self.text(each)}" for name, each in children.items()])


def _on_lines(begin: str, items: Sequence[str]) -> str:
    """A bracket that was begun, with items on lines of their own, if there are any."""
    return "\n  ".join([begin, *(item.replace("\n", "\n  ") for item in items)]) + ("\n)" if items else ")")


def _array(value: Any) -> str:
    array = value.detach().cpu() if isinstance(value, Tensor) else torch.as_tensor(np.ascontiguousarray(value))
    if array.numel() <= _MOST_VALUES:
        return f"tensor({array.tolist()})"
    whole = array.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"tensor(shape={tuple(array.shape)}, checksum={_checksum(whole)})"


def _is_known(kind: type) -> bool:
    return f"{kind.__module__}.".startswith(_LIBRARIES)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Attributes that describe an object: all of a library's, and what others were made with."""
    held = getattr(value, "__dict__", {})
    if dataclasses.is_dataclass(value):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if field.init)
        return
    kinds: tuple[Any, ...] = type(value).__mro__
    names = _parameters(kinds[0])
    known = any(map(_is_known, kinds))
    kornias = any(kind.__module__.startswith("kornia.") for kind in kinds)
    for name, each in held.items():
        if name in _STATE or isinstance(each, _NO_ARGUMENTS) or not (known or name.strip("_") in names):
            continue
        # Kornia's modules have the dtype that .to() gave them, and samplers made of their other attributes.
        if not (kornias and (name == "dtype" or isinstance(each, Distribution))):
            yield name, each


@functools.cache
def _parameters(kind: type) -> frozenset[str]:
    """Names of the parameters of all constructors of a class."""
    found: set[str] = set()
    for each in kind.__mro__[:-1]:
        if "__init__" in vars(each):
            found.update(inspect.signature(vars(each)["__init__"]).parameters)
    return frozenset(name.strip("_") for name in found) - {"self", "args", "kwargs"}
