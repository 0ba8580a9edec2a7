"""Common part of ``collate_ragged`` and ``collate_encoded``: collation member by member, and memory for packed images."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentError, ArgumentTypeError, add_note, shown
from gpuaug.core.settings import on_host
from gpuaug.core.torchvision_types import type_name

AllocateStrided = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor | None]
"""Function that returns a tensor of a shape, strides and dtype, or ``None`` if its memory is full."""

_PLAIN = {int, float, str, bytes, Tensor}
"""Types of members that are collated without a further check."""

_allocate: ContextVar[AllocateStrided | None] = ContextVar("gpuaug_allocate", default=None)


@contextmanager
def allocating_with(allocate: AllocateStrided) -> Iterator[None]:
    """Context manager in which ``allocated`` takes memory from ``allocate``."""
    token = _allocate.set(allocate)
    try:
        yield
    finally:
        _allocate.reset(token)


def allocated(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor for a part of the batch: in a slot of the ring, or in a worker's shared memory."""
    allocate = _allocate.get()
    stride = torch.empty(shape, device="meta").stride()
    tensor = allocate(shape, stride, dtype) if allocate is not None else None
    if tensor is not None:
        return tensor
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype, device="cpu")
    # In shared memory, as default_collate allocates it: the batch is then sent without another copy.
    storage = torch.UntypedStorage._new_shared(int(np.prod(shape)) * dtype.itemsize)
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, stride)  # type: ignore[call-overload, no-any-return]


class MemberCollate:
    """Collate function that packs the image members of samples and collates the other members.

    Args:
        are_images: Function of the values of a member, one per sample, and the member's path, which is empty for the samples
            themselves. Returns whether the values are images to be packed.
        pack: Function of the same arguments that returns the packed images.
        refuse: Function of a value and its position that raises the error about a value that should be an image.
    """

    def __init__(
        self,
        are_images: Callable[[Sequence[Any], str], bool],
        pack: Callable[[Sequence[Any], str], Any],
        refuse: Callable[[Any, str], NoReturn],
    ) -> None:
        self._are_images = are_images
        self._pack = pack
        self._refuse = refuse

    def __call__(self, samples: Sequence[Any]) -> Batch:
        """Collate samples that all have the structure of the first sample.

        Raises:
            ArgumentTypeError: If ``samples`` is not a sequence.
            ArgumentError: If ``samples`` is empty, or a sample has another structure than the first.
        """
        if not isinstance(samples, Sequence) or isinstance(samples, str | bytes | bytearray | memoryview):
            way_out = "Give the function itself to the DataLoader: collate_fn=…."
            raise ArgumentTypeError(f"samples must be a list of samples, got {shown(samples)}. {way_out}")
        if not samples:
            raise ArgumentError("A batch must have a sample, got none. Have the batch sampler leave empty batches out.")
        if self._are_images(samples, ""):
            return self._pack(samples, "")
        if not batches.is_container(samples[0]):
            self._refuse(samples[0], where(0, ""))
        return self._by_member(samples, "")

    def _by_member(self, samples: Sequence[Any], path: str) -> Batch:
        first = samples[0]
        columns = {name: (path + _member_path(first, name), column) for name, column in _columns(samples, path).items()}
        packs = {name: self._pack_of(column, member_path) for name, (member_path, column) in columns.items()}
        if not any(packs.values()):
            member_path, value = max(
                ((member_path, column[0]) for member_path, column in columns.values()),
                key=lambda path_and_value: _likeness(path_and_value[1]),
                default=(path, first),
            )
            self._refuse(value, where(0, member_path))
        collated = {name: (packs[name] or _collated)(column, member_path) for name, (member_path, column) in columns.items()}
        if type(first) in {tuple, list}:
            return list(collated.values())  # default_collate too returns a list for a tuple
        return batches.replace(first, collated)

    def _pack_of(self, members: Sequence[Any], path: str) -> Callable[[Sequence[Any], str], Any] | None:
        """Function that packs a member that is an image, or a list or tuple of views; ``None`` for other members."""
        if self._are_images(members, path):
            return self._pack
        first = members[0]
        if not isinstance(first, tuple | list):
            return None
        for index in range(len(first)):
            view = [member[index] for member in members if isinstance(member, tuple | list) and index < len(member)]
            if self._are_images(view, f"{path}[{index}]"):
                return self._by_member
        return None


def where(sample: int, path: str) -> str:
    """Position of a value for an error message: ``sample 3 at ['image']``."""
    return f"sample {sample} at {path}" if path else f"sample {sample}"


def _likeness(value: Any) -> int:
    """Likeness of a value to an image, from 0 to 2: an array 2, other objects such as text 1, a number 0."""
    return 2 if getattr(value, "ndim", 0) >= 2 else int(not isinstance(value, int | float | np.generic | Tensor))


def _columns(samples: Sequence[Any], path: str) -> dict[Any, list[Any]]:
    """For each member of the first sample, its values in all samples."""
    first = samples[0]
    names = batches.member_names(first)
    if type(first) is tuple and all(type(sample) is tuple and len(sample) == len(first) for sample in samples):
        return dict(enumerate(map(list, zip(*samples, strict=True))))  # fast path for tuples: a fifth of the time
    for number, sample in enumerate(samples):
        sample_names = batches.member_names(sample) if batches.is_container(sample) else []
        if sample_names != names and not (isinstance(first, Mapping) and set(names) <= set(sample_names)):
            got = f"{', '.join(map(repr, sample_names))}" if sample_names else f"{type(sample).__name__}"
            raise ArgumentError(
                f"Samples must have the members of the first, {', '.join(map(repr, names))}, got {got} in "
                f"{where(number, path)}. Return samples of one form from the dataset."
            )
    return {name: [batches.member(sample, name) for sample in samples] for name in names}


def _collated(members: Sequence[Any], path: str) -> Any:
    if any(_is_target(member) for member in members if type(member) not in _PLAIN):
        return list(members)
    try:
        with on_host():
            return default_collate(list(members))
    except Exception as error:
        way_out = "What it cannot stack" if isinstance(error, TypeError) else "What differs in size from sample to sample"
        add_note(
            error,
            f"gpuaug: raised by default_collate for {path} of the samples. {way_out} belongs into a dict there, as boxes do: "
            "{'boxes': …}. The batch then has a list of these dicts.",
        )
        raise


def _is_target(value: Any) -> bool:
    """Whether ``value`` is the target of one image.

    Targets are torchvision's masks, boxes and keypoints; mappings; and other containers that are empty or hold anything but
    numbers and text. Mappings are targets whatever they hold: for an image without annotations the keys may differ.
    """
    if not batches.is_container(value):
        return type_name(value) in ("Mask", "BoundingBoxes", "KeyPoints")
    if isinstance(value, Mapping):
        return True
    inside = [batches.member(value, name) for name in batches.member_names(value)]
    return not inside or not all(isinstance(member, int | float | str | bytes | np.generic) for member in inside)


def _member_path(container: Any, name: Any) -> str:
    return f"[{name!r}]" if batches.by_key(container) else f".{name}"
