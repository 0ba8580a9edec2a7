"""Shared by ``collate_ragged`` and ``collate_encoded``: the walk over samples, and memory for packed images."""

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

Place = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor | None]
"""Memory for a tensor of this shape, strides and dtype, or ``None`` if there is no room."""

_PLAIN = {int, float, str, bytes, Tensor}
"""Types of most members that are no images."""

_place: ContextVar[Place | None] = ContextVar("gpuaug_place", default=None)


@contextmanager
def placing_into(place: Place) -> Iterator[None]:
    """A block in which ``allocated`` takes memory from ``place``."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def allocated(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor for a part of the batch: in a slot of the ring, or in a worker's shared memory."""
    place = _place.get()
    stride = torch.empty(shape, device="meta").stride()
    found = place(shape, stride, dtype) if place is not None else None
    if found is not None:
        return found
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype, device="cpu")
    # As default_collate does: the batch is in shared memory then, and is sent without another copy.
    storage = torch.UntypedStorage._new_shared(int(np.prod(shape)) * dtype.itemsize)
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, stride)  # type: ignore[call-overload, no-any-return]


class MemberCollate:
    """A collate function that packs the members of samples that are images, and collates the other members.

    Args:
        are_images: Whether a member, given as one value for each sample, is packed. It is also given the path of the member,
            which is empty for the samples themselves.
        pack: Makes one object of such values. It is given the same.
        refuse: Raises the error about a value that should be an image. It is given where the value is.
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
        """Collate samples of one form, which the first has.

        Raises:
            ArgumentTypeError: If they are in no list or other sequence.
            ArgumentError: If there is no sample.
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
        columns = {name: (path + _way(first, name), column) for name, column in _columns(samples, path).items()}
        packs = {name: self._pack_of(column, way) for name, (way, column) in columns.items()}
        if not any(packs.values()):
            way, likely = max(
                ((way, column[0]) for way, column in columns.values()),
                key=lambda found: _likeness(found[1]),
                default=(path, first),
            )
            self._refuse(likely, where(0, way))
        made = {name: (packs[name] or _collated)(column, way) for name, (way, column) in columns.items()}
        if type(first) in {tuple, list}:
            return list(made.values())  # of tuples too, as default_collate has it
        return batches.replace(first, made)

    def _pack_of(self, members: Sequence[Any], path: str) -> Callable[[Sequence[Any], str], Any] | None:
        """The packing function of a member: an image, or a list or tuple of views. ``None`` for other members."""
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
    """Position of a value for an error text: ``sample 3 at ['image']``."""
    return f"sample {sample} at {path}" if path else f"sample {sample}"


def _likeness(value: Any) -> int:
    """Rank of a value that is no image by its likeness to one: an array above text, text above a number."""
    return 2 if getattr(value, "ndim", 0) >= 2 else int(not isinstance(value, int | float | np.generic | Tensor))


def _columns(samples: Sequence[Any], path: str) -> dict[Any, list[Any]]:
    """The values of each member of the first sample, one for each sample."""
    first = samples[0]
    names = batches.member_names(first)
    if type(first) is tuple and all(type(sample) is tuple and len(sample) == len(first) for sample in samples):
        return dict(enumerate(map(list, zip(*samples, strict=True))))  # most samples, in a fifth of the time
    for number, sample in enumerate(samples):
        have = batches.member_names(sample) if batches.is_container(sample) else []
        if have != names and not (isinstance(first, Mapping) and set(names) <= set(have)):
            got = f"{', '.join(map(repr, have))}" if have else f"{type(sample).__name__}"
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
    """Whether ``value`` is one image's target: a mask, boxes or keypoints of torchvision's, or a container.

    Of containers: a mapping, an empty container, or one that holds more than numbers and text. Of a mapping the keys may be
    other ones for an image without annotations, so what is in it does not count.
    """
    if not batches.is_container(value):
        return type_name(value) in ("Mask", "BoundingBoxes", "KeyPoints")
    if isinstance(value, Mapping):
        return True
    inside = [batches.member(value, name) for name in batches.member_names(value)]
    return not inside or not all(isinstance(member, int | float | str | bytes | np.generic) for member in inside)


def _way(container: Any, name: Any) -> str:
    return f"[{name!r}]" if batches.by_key(container) else f".{name}"
