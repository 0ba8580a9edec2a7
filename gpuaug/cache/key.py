"""Key of a cache: text of everything that a row depends on, apart from its sample."""

import hashlib
import inspect
import json
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gpuaug.cache.recorder import write_error
from gpuaug.core.errors import GpuAugWarning
from gpuaug.stages.base import BoundStage, Stage
from gpuaug.stages.definition import definition
from gpuaug.stages.encoders import attribute_tensors
from gpuaug.stages.feature import FeatureStage

_CHUNK = 1 << 22
"""Number of 32-bit words of a weight that are hashed at once, which limits the memory of the hash."""

KEY_FILE = "key.json"
"""File in the folder of a key: what the key was made of."""

_LIBRARIES = ("gpuaug", "torch", "torchvision", "kornia")


def key_parts(stages: Sequence[tuple[BoundStage, Stage]], seed: int, device: torch.device) -> dict[str, Any]:
    """Return what the rows depend on, as plain values.

    Args:
        stages: The stages up to the encoder whose results are stored.
        seed: Seed of the loader.
        device: Device of the loader.

    Warns:
        GpuAugWarning: If the source of a function or class of the user cannot be found.

    Cost:
        Reads each weight of the encoders once, on their device, and waits once for the device.
    """
    code: set[Any] = set()
    definitions = {bound.name: definition(stage, code) for bound, stage in stages}
    tensors = [
        tensor
        for _, stage in stages
        if isinstance(stage, FeatureStage)
        for module in stage.branches.values()
        for tensor in (*module.parameters(), *module.buffers(), *attribute_tensors(module))
    ]
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return {
        "seed": seed,
        "device": device.type,
        "autocast of the training thread": str(autocast),
        "stages": definitions,
        "weights": weights_hash(tensors),
        **_code_parts(code),
        "decoders": {name: text for bound, _ in stages for name, text in bound.versions([bound.name]).items()},
    }


def write_key(folder: Path, parts: Mapping[str, Any]) -> None:
    """Write what a key was made of, if it is not written yet. ``folder``: of the key.

    Raises:
        GpuAugError: If the folder cannot be written.
    """
    path = folder / KEY_FILE
    if path.exists():
        return
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(parts, indent=1), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise write_error(folder, error) from error


def keys_in(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the keys in the folder of a cache: each with what it was made of."""
    paths = sorted(folder.glob(f"*/{KEY_FILE}"), key=lambda path: path.stat().st_mtime_ns)
    return {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def key_of(parts: Mapping[str, Any]) -> str:
    """Return the key: 16 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def difference(parts: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the names of the parts in which two keys differ."""
    names = [name for name in {**parts, **other} if parts.get(name) != other.get(name)]
    return ", ".join(names)


def weights_hash(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the values, shapes and dtypes of tensors, computed on their devices."""
    digest = hashlib.blake2b(digest_size=8)
    sums = []
    for tensor in tensors:
        for plain in _plain(tensor.detach()):
            digest.update(f"{tuple(plain.shape)} {plain.dtype}".encode())
            sums.append(_sum(plain))
    if sums:
        digest.update(repr(torch.stack([value.to(sums[0].device) for value in sums]).tolist()).encode())
    return digest.hexdigest()


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors of which a tensor subclass, such as a quantised weight, consists."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for name in names:
            yield from _plain(getattr(tensor, name))
    elif tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta:
        yield tensor


def _sum(tensor: Tensor) -> Tensor:
    """Return a sum, modulo 2^64, of the tensor's words, each multiplied by a number that depends on its place."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    data = torch.nn.functional.pad(data, (0, -len(data) % 4))
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for number, words in enumerate(data.view(torch.int32).split(_CHUNK)):
        places = torch.arange(len(words), device=data.device) + number * _CHUNK
        factors = (places * 0x1E3779B97F4A7C15) ^ ((places + 1) << 17) | 1
        total += (words.long() * factors).sum()
    return total


def _code_parts(code: set[Any]) -> dict[str, Any]:
    """Return versions of the libraries that stages use, and hashes of the source of the user's functions and classes.

    Warns:
        GpuAugWarning: If the source of a function or class cannot be found.
    """
    packages = set(_LIBRARIES)
    sources: dict[str, list[str]] = {}
    unknown = []
    for value in code:
        module = str(getattr(value, "__module__", None) or "builtins")
        package = module.partition(".")[0]
        file = str(getattr(sys.modules.get(module), "__file__", ""))
        if package in sys.stdlib_module_names:
            continue
        if package in _LIBRARIES or "site-packages" in file or "dist-packages" in file:
            packages.add(package)
            continue
        try:
            source = inspect.getsource(value).encode()
            sources.setdefault(value.__qualname__, []).append(hashlib.blake2b(source, digest_size=8).hexdigest())
        except (OSError, TypeError):
            unknown.append(value.__qualname__)
    if unknown:
        warnings.warn(
            f"A change of {', '.join(sorted(unknown))} is not noticed by the feature cache, because Python does not find the "
            "source. Define it in a file, or delete the folder of the cache after a change.",
            GpuAugWarning,
            stacklevel=2,
        )
    return {
        "versions": {name: _version(name) for name in packages},
        "code": {name: sorted(hashes) for name, hashes in sources.items()},
    }


def _version(package: str) -> str:
    """Return the version of a package, which need not be imported yet."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return str(getattr(sys.modules.get(package), "__version__", ""))
