"""Common part of ``collate_ragged`` and ``collate_encoded``: collation member by member, and memory for packed images.

A *member* is a value of a sample: the value of a dict's key, an element of a tuple. The images of a member are *packed*:
written into one flat buffer. In a worker with a *ring* (memory that is shared with the main process), the buffer is in a *slot*
of the ring. A *target* has the annotations of one image.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, is_dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentError, ArgumentTypeError, add_note, shown
from gpuaug.core.packed_targets import Allocate
from gpuaug.core.settings import on_host
from gpuaug.core.targets import type_name

_PLAIN = {int, float, str, bytes, Tensor}
"""Types of values that are never targets. ``_is_target`` is not called for them."""

_allocate: ContextVar[Allocate | None] = ContextVar("gpuaug_allocate", default=None)
"""Allocator of ``allocate_tensor``; ``None``: torch's allocator."""


@contextmanager
def allocating_with(allocate: Allocate) -> Iterator[None]:
    """Context manager in which ``allocate_tensor`` takes memory from ``allocate``."""
    token = _allocate.set(allocate)
    try:
        yield
    finally:
        _allocate.reset(token)


def allocate_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor for a part of the batch: in a slot of the ring, or in a worker's shared memory."""
    allocate = _allocate.get()
    tensor = allocate(shape, dtype) if allocate is not None else None
    if tensor is not None:
        return tensor
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype, device="cpu")
    # In shared memory, as in default_collate, so that the tensor is not copied when the batch is sent.
    storage = torch.UntypedStorage._new_shared(int(np.prod(shape)) * dtype.itemsize)
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage).view(shape)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True, eq=False)
class MemberCollate:
    """Collate function that packs the image members of samples and collates the other members.

    Args:
        are_images: Function of (values, path) that returns whether the values are images to be packed. ``values``: values of
            one member, one per sample. ``path``: path of the member within a sample; empty if the samples are images.
        pack: Function of (values, path) that returns the packed images.
        refuse: Function of (value, position of the value as text) that raises the error about a value that is not an image.
    """

    are_images: Callable[[Sequence[Any], str], bool]
    pack: Callable[[Sequence[Any], str], Any]
    refuse: Callable[[Any, str], NoReturn]

    def __call__(self, samples: Sequence[Any], flatten: Any = None) -> Batch:
        """Collate samples that all have the structure of the first sample.

        Args:
            samples: (B,) samples.
            flatten: Key or index of a member that is a list of images per sample, of any length. ``None``: no member.

        Raises:
            ArgumentTypeError: If ``samples`` is not a sequence.
            ArgumentError: If ``samples`` is empty, a sample has another structure than the first, or no list under ``flatten``.
        """
        if not isinstance(samples, Sequence) or isinstance(samples, str | bytes | bytearray | memoryview):
            way_out = "Pass the function itself to the DataLoader: collate_fn=…."
            raise ArgumentTypeError(f"samples must be a list of samples, got {shown(samples)}. {way_out}")
        if not samples:
            raise ArgumentError("A batch must have a sample, got none. Leave empty batches out of the batch sampler.")
        if flatten is None and self.are_images(samples, ""):
            return self.pack(samples, "")
        if not batches.is_container(samples[0]):
            self.refuse(samples[0], position_text(0, ""))
        return self._by_member(samples, "", flatten)

    def _by_member(self, samples: Sequence[Any], path: str, flatten: Any = None) -> Batch:
        """Collate samples that are containers, member by member.

        Args:
            samples: (B,) containers of the same structure.
            path: Path of the containers within the samples.
            flatten: See ``__call__``.

        Raises:
            ArgumentTypeError, ArgumentError: If no member holds images, or ``flatten`` is wrong.
        """
        first = samples[0]
        members = {name: (path + _member_path(first, name), values) for name, values in _values_by_name(samples, path).items()}
        lists = [] if flatten is None else _lists(first, flatten, members)
        packers = {
            name: self._pack_lists if name == flatten else self._packer(values, member_path)
            for name, (member_path, values) in members.items()
        }
        if not any(packers.values()):  # no member has images: raise an error about the member that is most like an image
            member_path, value = max(
                ((member_path, values[0]) for member_path, values in members.values()),
                key=lambda path_and_value: _image_likeness(path_and_value[1]),
                default=(path, first),
            )
            self.refuse(value, position_text(0, member_path))
        collated = {name: (packers[name] or _collate)(values, member_path) for name, (member_path, values) in members.items()}
        if flatten is not None:
            counts_name = f"{flatten}_counts" if isinstance(first, Mapping) else len(collated)
            if counts_name in collated:
                raise ArgumentError(
                    f"Samples must not have a member {counts_name!r} with flatten={flatten!r}, which adds it to the batch, got "
                    f"{shown(first[counts_name])}. Rename the member in the dataset."
                )
            collated[counts_name] = torch.tensor([len(images) for images in lists], device="cpu")
        if type(first) in {tuple, list}:
            return list(collated.values())  # like default_collate, which returns a list for a tuple
        return batches.replace(first, collated)

    def _pack_lists(self, lists: Sequence[Sequence[Any]], path: str) -> Any:
        """Pack the images of all lists of a member, in the order of the samples."""
        return self.pack([image for images in lists for image in images], path)

    def _packer(self, values: Sequence[Any], path: str) -> Callable[[Sequence[Any], str], Any] | None:
        """Return the function that packs the images, or lists of images, of a member; ``None`` for other members."""
        if self.are_images(values, path):
            return self.pack
        first = values[0]
        if not isinstance(first, tuple | list):
            return None
        for index in range(len(first)):
            elements = [value[index] for value in values if isinstance(value, tuple | list) and index < len(value)]
            if self.are_images(elements, f"{path}[{index}]"):
                return self._by_member
        return None


def _lists(first: Any, flatten: Any, members: Mapping[Any, tuple[str, list[Any]]]) -> list[Any]:
    """Return the lists of images of the samples.

    Args:
        first: First sample.
        flatten: Key or index of the member.
        members: Name → (path, values in all samples), for each member.

    Raises:
        ArgumentError, ArgumentTypeError: If ``flatten`` does not name a list in each sample.
    """
    if not isinstance(first, Mapping) and type(first) not in {tuple, list}:
        raise ArgumentError(
            f"Samples must be dicts or tuples with flatten={flatten!r}, got {type(first).__name__}. "
            "Return a dict, to which the numbers of images are added."
        )
    # The types are compared first, because an array or tensor is not equal or unequal to a key.
    lists = next((values for name, (_, values) in members.items() if type(name) is type(flatten) and name == flatten), None)
    if lists is None:
        names = ", ".join(map(repr, members))
        raise ArgumentError(f"flatten must be a key or index of the samples, got {shown(flatten)}. They have {names}.")
    for number, images in enumerate(lists):
        if not isinstance(images, tuple | list):
            raise ArgumentTypeError(
                f"The member {flatten!r} of a sample must be a list of images with flatten={flatten!r}, got "
                f"{type(images).__name__} in sample {number}. Return [] for a sample without images."
            )
    return lists


def position_text(sample: int, path: str) -> str:
    """Return the position of a value for an error message: ``sample 3 at ['image']``."""
    return f"sample {sample} at {path}" if path else f"sample {sample}"


def _image_likeness(value: Any) -> int:
    """Return 3 for an array or tensor with two or more axes, 2 for bytes, 0 for a number or another tensor, 1 for any other."""
    if getattr(value, "ndim", 0) >= 2:
        return 3
    return 2 if isinstance(value, bytes | bytearray) else int(not isinstance(value, int | float | np.generic | Tensor))


def _values_by_name(samples: Sequence[Any], path: str) -> dict[Any, list[Any]]:
    """Return name → values in all samples, for each member of the first sample.

    Raises:
        ArgumentError: If a sample lacks a member of the first sample.
    """
    first = samples[0]
    names = batches.member_names(first)
    if type(first) is tuple and all(type(sample) is tuple and len(sample) == len(first) for sample in samples):
        return dict(enumerate(map(list, zip(*samples, strict=True))))  # fast path for tuples: takes a fifth of the time
    for number, sample in enumerate(samples):
        sample_names = batches.member_names(sample) if batches.is_container(sample) else []
        if sample_names != names and not (isinstance(first, Mapping) and set(names) <= set(sample_names)):
            description = ", ".join(map(repr, sample_names)) or type(sample).__name__
            raise ArgumentError(
                f"Samples must have the members of the first, {', '.join(map(repr, names))}, got {description} in "
                f"{position_text(number, path)}. Return samples with the same members from the dataset."
            )
    return {name: [batches.member(sample, name) for sample in samples] for name in names}


def _collate(values: Sequence[Any], path: str) -> Any:
    """Collate a member without images: a list of targets unchanged, other values with ``default_collate``."""
    if any(_is_target(value) for value in values if type(value) not in _PLAIN):
        return list(values)
    try:
        with on_host():
            return default_collate(list(values))
    except Exception as error:
        reason = "are not numbers or tensors" if isinstance(error, TypeError) else "differ in size from sample to sample"
        add_note(
            error,
            f"gpuaug: raised by default_collate for {path} of the samples. Put values that {reason} into a dict in the sample, "
            "such as {'boxes': …}, or return masks as torchvision.tv_tensors.Mask(mask). The batch then has a list of these.",
        )
        raise


def _is_target(value: Any) -> bool:
    """Return whether ``value`` is the target of one image.

    Targets are torchvision's masks, boxes and keypoints, all mappings and dataclasses, and other containers that are empty or
    hold more than numbers and text. Mappings are not collated, because the mapping of an image without annotations may have
    other keys. Dataclasses are not collated, because ``default_collate`` does not accept dataclasses.
    """
    if not batches.is_container(value):
        return type_name(value) in ("Mask", "BoundingBoxes", "KeyPoints")
    if isinstance(value, Mapping) or is_dataclass(value):
        return True
    members = [batches.member(value, name) for name in batches.member_names(value)]
    return not members or not all(isinstance(member, int | float | str | bytes | np.generic) for member in members)


def _member_path(container: Any, name: Any) -> str:
    """Return the code that reads a member, such as ``['image']`` or ``.image``."""
    return f"[{name!r}]" if batches.by_key(container) else f".{name}"
