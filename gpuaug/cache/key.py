"""Key of the rows of a feature cache: a hash of everything that a row depends on, except its sample.

A *row* is the recorded results of the stages up to an encoder for one sample. The *parts* of a key are the named values from
which it is computed, such as the seed, and hashes of the arguments of the stages. Each key has a folder, with its parts in a
file, and its rows.

The arguments of the stages, and all objects that they refer to, are hashed by a *walk* over these objects (``_Values``). The
*path* of an object is the names of the attributes that lead to it.
"""

import copyreg
import dis
import hashlib
import json
import logging
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gpuaug.cache.shards import write_file
from gpuaug.core.errors import warn
from gpuaug.stages.base import BoundStage, Stage
from gpuaug.stages.definition import IGNORED_TYPES, arguments, shown_text, without_ignored

_CHUNK = 1 << 22
"""Number of 32-bit words of a weight that are hashed at once, which limits the memory that hashing takes."""

KEY_FILE = "key.json"
"""File in the folder of a key: the parts from which the key was computed."""

_FORMAT = 2
"""Format of the shards. Shards of another format have another key."""

_DEPTH = 3
"""Maximum number of names in a path with a separate hash: the argument of the stage, and two attributes. The hash of such a
path includes the values at longer paths that begin with it."""

_MAX_LISTED = 4
"""Maximum number of parts that a warning names."""

_PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.layout, torch.memory_format)
"""Types of values that are hashed by their ``repr``."""

_IGNORED = IGNORED_TYPES | ModuleType | logging.Logger
"""Types of values that are not hashed. Of modules (files), the attributes that functions use are hashed (``_globals``)."""

_CHANGING = ("torch._dynamo.", "torch._inductor.", "triton.", "threading.", "concurrent.", "multiprocessing.", "queue.")
"""Packages whose objects, such as compiled functions, change during a run. Only the function in such an object is hashed."""

_CODE = re.compile("co_(code|consts|.*names|.*vars|.*argcount|flags|exceptiontable)")
"""Attributes of code objects that are hashed: those that do not depend on the position of the code in its file."""

_UNUSED = re.compile("__(module|doc|annotations|dict|weakref|firstlineno|static_attributes)__")
"""Attributes of classes that are not hashed: they depend on the position of the code, or do not change rows."""

_LIBRARIES = ("gpuaug", "torch", "torchvision", "kornia")
"""Libraries whose versions are part of every key."""


def key_parts(stages: Sequence[tuple[BoundStage, Stage]], seed: int, device: torch.device) -> dict[str, Any]:
    """Return name → value of the parts of the key. The values are numbers and text. Warnings show the names.

    Args:
        stages: (``BoundStage``, ``Stage``) of the stages up to the encoder whose results are stored.
        seed: Seed of the loader.
        device: Device of the loader.

    Warns:
        GpuAugWarning: If the stages refer to an object whose attributes Python cannot read.

    Cost:
        A walk over all objects that the stages refer to, some microseconds per object. Reads each weight once, on its device,
        and waits once for the device.
    """
    values = _Values()
    hashes: dict[str, str] = {}
    decoders: dict[str, str] = {}
    for bound, stage in stages:
        # The name of the stage is the key of the decoders of images: they are read even if no batch was decoded yet.
        decoders |= {f"decoders of {name}": text for name, text in bound.versions([bound.name]).items()}
        for name, value in {"class": type(stage), **arguments(stage)}.items():
            hashes |= values.hashes(f"{bound.name}.{name}", value)
    if values.unknown:
        warn(
            f"A change of {', '.join(sorted(values.unknown))} is not noticed by the feature cache, because Python cannot read "
            "its attributes. Give its class a method __reduce__, or delete the folder of the cache after a change."
        )
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return {
        "format of rows": _FORMAT,
        "seed": seed,
        "device": device.type,
        "autocast of the training thread": str(autocast),
        "weights": weights_hash(values.tensors),
        **hashes,
        **{f"version of {name}": _version(name) for name in sorted(values.packages)},
        **decoders,
    }


def write_key(folder: Path, parts: Mapping[str, Any]) -> None:
    """Write the parts of a key to a file in ``folder``, the folder of the key, unless the file exists.

    Raises:
        GpuAugError: If the folder cannot be written.
    """
    path = folder / KEY_FILE
    if not _parts_in(path):
        write_file(path, json.dumps(parts, indent=1).encode())


def keys_in(folder: Path) -> dict[str, dict[str, Any]]:
    """Return key → parts of each key in the folder of a cache, oldest first. The parts are empty if the file is damaged."""
    paths = sorted(folder.glob(f"*/{KEY_FILE}"), key=lambda path: path.stat().st_mtime_ns)
    return {path.parent.name: _parts_in(path) for path in paths}


def _parts_in(path: Path) -> dict[str, Any]:
    """Return the parts of a key that a file holds; empty if there is no such file, or it is damaged."""
    with suppress(OSError, ValueError):
        parts = json.loads(path.read_text(encoding="utf-8"))
        return parts if isinstance(parts, dict) else {}
    return {}


def key_of(parts: Mapping[str, Any]) -> str:
    """Return the key: 16 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def difference(parts: Mapping[str, Any], other_parts: Mapping[str, Any]) -> str:
    """Return the names of the parts that differ between two keys, at most ``_MAX_LISTED``, as text for a warning."""
    if not other_parts:
        return f"values, which are not known, because {KEY_FILE} is damaged"
    names = [name for name in {**parts, **other_parts} if parts.get(name) != other_parts.get(name)]
    return ", ".join(names[:_MAX_LISTED] + ["…"] * (len(names) > _MAX_LISTED))


def weights_hash(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the values, shapes and dtypes of strided tensors, computed on their devices."""
    digest = hashlib.blake2b(digest_size=8)
    sums = []
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        sums.append(_sum(tensor))
    if sums:
        digest.update(repr(torch.stack([value.to(sums[0].device) for value in sums]).tolist()).encode())
    return digest.hexdigest()


def _sum(tensor: Tensor) -> Tensor:
    """Return a hash of the values of a tensor, as an int64 on its device.

    It is the sum, modulo 2^64, of the tensor's 32-bit words, each multiplied by an odd number that depends on its index.
    """
    data = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    data = torch.nn.functional.pad(data, (0, -len(data) % 4))
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for chunk_index, words in enumerate(data.view(torch.int32).split(_CHUNK)):
        indices = torch.arange(len(words), device=data.device) + chunk_index * _CHUNK
        # An arbitrary constant; | 1 makes the factor odd, so that a change of one word always changes the sum.
        factors = (indices * 0x1E3779B97F4A7C15) ^ ((indices + 1) << 17) | 1
        total += (words.long() * factors).sum()
    return total


class _Values:
    """Hashes of all values that stages refer to: attributes, items, code, closures, and global variables in code.

    Code of libraries is not hashed, because the versions of the libraries are parts of the key. Code of the user is hashed as
    Python has loaded it, without names of modules and files, comments and line numbers. For types that ``_inner_values`` does
    not name, the values that ``pickle`` would store are hashed.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        """Strided tensors, in the order of the walk. ``weights_hash`` hashes their values, which ``hashes`` leaves out."""
        self.packages = set(_LIBRARIES)
        """Names of the libraries whose code the stages use."""
        self.unknown: set[str] = set()
        """Names of the classes of values whose attributes cannot be read."""

    def hashes(self, name: str, root: Any) -> dict[str, str]:
        """Return path → hash, for ``root`` and all values that it refers to. Paths are text, and begin with ``name``.

        The values at paths of more than ``_DEPTH`` names are part of the hash of their first ``_DEPTH`` names. The walk is a
        loop, not a recursion, because chains of objects may be long.
        """
        digests: dict[str, Any] = {}
        # id → (number in the order of the walk, value). Objects may refer to each other: a value that was visited is hashed by
        # its number. It stays referenced, so that its id is not reused.
        visited: dict[int, tuple[int, Any]] = {}
        pending: list[tuple[tuple[str, ...], Any]] = [((name,), root)]
        while pending:
            path, value = pending.pop()
            inner_values: list[tuple[str, Any]] = []
            if type(value) in _PLAIN_TYPES:
                text = repr(value)
            elif isinstance(value, _IGNORED):
                text = "…"
            elif id(value) in visited:
                text = f"value {visited[id(value)][0]}"
            else:
                # Constants of Python are not recorded: whether two equal constants are one object differs between runs.
                if not isinstance(value, tuple | frozenset | CodeType):
                    visited[id(value)] = len(visited), value
                try:
                    inner_values = list(self._inner_values(value))
                except Exception:  # attributes of a class of the user may raise any error
                    # Objects of Python itself that cannot be read are locks, open files and iterators, which change no rows.
                    if not _is_of_python(type(value).__module__):
                        self.unknown.add(type(value).__qualname__)
                class_or_function = value if isinstance(value, type | FunctionType) else type(value)
                text = f"{class_or_function.__qualname__} {[name for name, _ in inner_values]}"
            digest = digests.setdefault(".".join(path), hashlib.blake2b(digest_size=8))
            digest.update(f"{text}\n".encode(errors="surrogateescape"))
            # Reversed, because ``pop`` takes the last one first. Items of containers have no name.
            pending += [((*path, name)[:_DEPTH] if name else path, inner) for name, inner in reversed(inner_values)]
        return {path: digest.hexdigest() for path, digest in digests.items()}

    def _inner_values(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield (name, value) of each value that a value refers to, such as its attributes and the items of a container.

        Items of containers have an empty name, so that they belong to the path of the container: there may be many.
        """
        is_function = isinstance(value, FunctionType)
        module_name = value.__globals__.get("__name__") if is_function else getattr(value, "__module__", None)
        is_of_library = (is_function or isinstance(value, type)) and self._is_of_library(module_name)
        if f"{module_name}.".startswith(_CHANGING):  # ``fn`` is the function of a kernel of Triton
            yield "function", getattr(value, "__wrapped__", getattr(value, "fn", None))
        elif isinstance(value, Tensor):
            yield from self._tensor_values(value)
        elif isinstance(value, CodeType):
            yield from ((name, getattr(value, name)) for name in dir(value) if _CODE.fullmatch(name))
        elif is_function:
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            # Variables of the enclosing function. A cell is empty if its variable has no value.
            yield from ((name, None if cell == CellType() else cell.cell_contents) for name, cell in cells)
            yield from sorted(vars(value).items())
            if not is_of_library:
                yield "code", (value.__code__, value.__defaults__, value.__kwdefaults__)
                yield from self._globals(value)
        elif isinstance(value, type):
            if not is_of_library:
                yield "bases", value.__bases__
                yield from sorted((name, inner) for name, inner in vars(value).items() if not _UNUSED.fullmatch(name))
        elif isinstance(value, MethodType | staticmethod | classmethod):
            yield from (("function", value.__func__), ("object", getattr(value, "__self__", None)))
        elif isinstance(value, property):
            yield "function", value.fget
        elif isinstance(value, Graph):  # of torch.fx
            yield "", str(value)
        elif type(value) is tuple:
            yield from (("", element) for element in value)
        elif type(value) in (set, frozenset):
            yield "", sorted(value, key=shown_text)  # the order of a set differs between processes
        elif isinstance(value, nn.Module) and isinstance(getattr(value, "definition", None), tuple):
            yield "definition", value.definition  # of gpuaug.fuse: pipeline and options
        elif isinstance(value, nn.Module):
            yield "class", type(value)
            yield from (*value.named_parameters(recurse=False), *value.named_buffers(recurse=False), *value.named_children())
            yield "hooks", [*value._forward_pre_hooks.values(), *value._forward_hooks.values()]
            yield from sorted(without_ignored(value, vars(value)).items())
        else:
            yield from self._pickled_values(value)

    def _pickled_values(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield (name, value) of the values that ``pickle`` would store for a value."""
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except Exception:
            if isinstance(value, Collection) and _is_of_python(type(value).__module__):  # such as MappingProxyType, memoryview
                value = dict(value) if isinstance(value, Mapping) else list(value)
                reduced = value.__reduce_ex__(4)
            else:
                reduced = type(value), (), vars(value)
        if isinstance(reduced, str):  # a global object, such as the function in a functools.lru_cache
            yield from (("name", reduced), ("function", getattr(value, "__wrapped__", None)))
            return
        # The result of ``__reduce_ex__`` has two to six elements: callable, arguments, state, iterator over items of a list,
        # iterator over pairs of a mapping, function that sets the state. Here padded with None to at least three elements.
        callable_, call_arguments, state, *elements = (*reduced, None)[: max(len(reduced), 3)]
        yield from (("class", callable_), ("arguments", call_arguments))
        if isinstance(state, dict):
            yield from sorted((str(name), inner) for name, inner in without_ignored(value, state).items())
        else:
            yield "state", state
        yield from (("", tuple(inner) if isinstance(inner, Iterator) else inner) for inner in elements if inner is not None)

    def _tensor_values(self, tensor: Tensor) -> Iterator[tuple[str, Any]]:
        """Yield (name, value) of the attributes of a tensor. A strided tensor is added to ``tensors``."""
        yield from sorted(vars(tensor).items())
        tensor = tensor.detach()
        # A wrapper subclass, such as a quantized weight, has its tensors in attributes.
        is_dense = tensor.layout is torch.strided and not (tensor.is_nested or is_traceable_wrapper_subclass(tensor))
        if is_dense and not tensor.is_meta:
            self.tensors.append(tensor.dequantize() if tensor.is_quantized else tensor)
        else:
            yield from self._pickled_values(tensor)

    def _globals(self, function: FunctionType) -> Iterator[tuple[str, Any]]:
        """Yield (name, value) of the global variables that a function uses.

        If a variable is a module (file) of the user, all its attributes are yielded whose names the code of the function uses.
        """
        codes = [function.__code__]
        for code in codes:  # grows in the loop
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        names = {name for code in codes for name in code.co_names if not name.startswith("__")}
        # ``co_names`` also has names that the code assigns or imports, but does not load.
        instructions = [instruction for code in codes for instruction in dis.get_instructions(code)]
        loaded = {instruction.argval for instruction in instructions if instruction.opname.startswith("LOAD_")}
        variables = [(name, function.__globals__[name]) for name in sorted(names & loaded & function.__globals__.keys())]
        modules: list[ModuleType] = []
        for name, value in variables:  # grows in the loop
            if not isinstance(value, ModuleType):
                yield name, value
            elif value not in modules and not self._is_of_library(value.__name__):
                modules.append(value)
                variables += [(name, vars(value)[name]) for name in sorted(names & vars(value).keys())]

    def _is_of_library(self, module: str | None) -> bool:
        """Return whether a module (file) belongs to Python or a library. The name of a library is added to ``packages``."""
        package = str(module).partition(".")[0]
        file = str(getattr(sys.modules.get(str(module)), "__file__", ""))
        if _is_of_python(package):
            return True
        is_library = package in _LIBRARIES or "site-packages" in file or "dist-packages" in file
        if is_library:
            self.packages.add(package)
        return is_library


def _is_of_python(module: str) -> bool:
    """Return whether a module belongs to Python's standard library."""
    return module.partition(".")[0] in sys.stdlib_module_names


def _version(package: str) -> str:
    """Return the version of a package, which need not be imported; an empty string if it has none."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return str(getattr(sys.modules.get(package), "__version__", ""))
