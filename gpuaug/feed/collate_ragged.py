"""``collate_ragged``: the images of a batch, whatever their sizes, in one flat buffer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentError
from gpuaug.core.ragged import Ragged, Shapes
from gpuaug.feed.image_input import Channels, is_image, prepared, refuse, sizes_of, unpacked

MOST_ELEMENTS = 2**31
"""Kernels count the values of a batch in 32 bits."""

MOST_SIDE = 2**24
"""They count the pixels of a side in float32."""

Place = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor | None]
"""Memory for a tensor of this shape, strides and dtype, or ``None`` if there is no room."""

_Pack = Callable[[Sequence[Any], str], Ragged]

_place: ContextVar[Place | None] = ContextVar("gpuaug_place", default=None)


@contextmanager
def placing_into(place: Place) -> Iterator[None]:
    """Have :func:`collate_ragged`, whoever calls it meanwhile, write to where ``place`` says."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def collate_ragged(samples: Sequence[Any], *, convert: bool = False, channels: Channels = 3) -> Batch:
    """Make a batch of samples whose images differ in size: ``DataLoader(dataset, collate_fn=gpuaug.collate_ragged)``.

    Images are PIL images, uint8 arrays (H, W, C) or (H, W), and uint8 tensors (C, H, W), torchvision's ``tv_tensors.Image``
    among them. A sample is an image, or a tuple, list, mapping, named tuple or dataclass with one or more in it, also in a
    list or tuple of views. What else is in a sample goes through torch's ``default_collate``, except targets: a mapping, list
    or tuple within a sample becomes a list with one entry for each sample, as it is; a list or tuple of numbers and text alone
    does not.

    Args:
        samples: Of one form; which members are images, the first says.
        convert: Whether images of other channels are converted: grey is repeated, an alpha channel dropped, palettes and CMYK
            are what PIL makes of them, and colour becomes grey by ITU-R 601.
        channels: Of every image: 3, or 1 for grey ones.

    Returns:
        A batch of the samples' form, as ``default_collate`` gives it (a list for a tuple), with a :class:`Ragged` for each
        member that is an image: its layout ``"chw"`` if the first one is a tensor, else ``"hwc"``. In a worker of a loader
        with slots it lies in one, which is overwritten after the batch was copied: return it from the collate function, and
        keep nothing of it there.

    Raises:
        ArgumentTypeError: If an image is not uint8, or none is where one is expected.
        ArgumentError: If an image has other channels than the batch and ``convert`` is false, no pixels, or a side of 2**24 or
            more; if a batch has 2**31 values or more.

    Cost:
        On the host, one copy of each image into the buffer; of a PIL image two, since PIL keeps a pixel in four bytes. In a
        worker of a :class:`StreamedLoader` the buffer is the slot that the GPU reads, so there is no other. Images of another
        layout than the first one's, or with their channels reversed, take some tenths of a millisecond each to be turned.

    Examples:
        >>> small, large = torch.zeros(3, 2, 2, dtype=torch.uint8), torch.ones(3, 4, 5, dtype=torch.uint8)
        >>> images, labels = collate_ragged([(small, 0), (large, 1)])
        >>> images
        Ragged(2 images of 3 channels, chw, cpu)
        >>> images[1].shape, labels
        (torch.Size([3, 4, 5]), tensor([0, 1]))
    """
    if channels not in (1, 3):
        raise ArgumentError(f"channels must be 1 or 3, got {channels!r}. Leave it out for RGB.")
    if not samples:
        raise ArgumentError("A batch must have a sample, got none. Have the batch sampler leave empty batches out.")
    pack = partial(_packed, channels=channels, convert=convert)
    first = samples[0]
    if is_image(first):
        return pack(samples, "")
    if not _is_container(first):
        refuse(first, "sample 0")
    inside = [(_way(first, name), _member(first, name)) for name in _names(first)]
    if not any(is_image(value) or _has_views(value) for _, value in inside):
        likely = [(way, value) for way, value in inside if getattr(value, "ndim", 0) >= 2] or inside or [("", first)]
        refuse(likely[0][1], _where(0, likely[0][0]))
    return _by_member(samples, "", pack)


def _packed(images: Sequence[Any], path: str, *, channels: Channels, convert: bool) -> Ragged:
    ready = [prepared(image, channels, convert=convert, where=_where(i, path)) for i, image in enumerate(images)]
    sizes = sizes_of(ready)
    if (sizes >= MOST_SIDE).any():
        longest = int(np.argmax(sizes)) // 2
        height, width = sizes[longest]
        raise ArgumentError(
            f"Images must have sides of fewer than 2**24 pixels, got {height}x{width} in {_where(longest, path)}. "
            "Cut it up in the dataset."
        )
    ends = sizes.prod(1).cumsum() * channels
    if ends[-1] >= MOST_ELEMENTS:
        overflowing = int(np.searchsorted(ends, MOST_ELEMENTS))
        raise ArgumentError(
            f"The images of a batch must have fewer than 2**31 values, got {ends[overflowing]} up to "
            f"{_where(overflowing, path)}. Lower batch_size, or have the dataset shrink its largest images."
        )
    planes = isinstance(images[0], Tensor)
    data = _allocated((int(ends[-1]),), torch.uint8)
    flat, start = data.numpy(), 0
    for image, (height, width), end in zip(ready, sizes.tolist(), ends.tolist(), strict=True):
        part = flat[start:end]
        room = part.reshape(channels, height, width).transpose(1, 2, 0) if planes else part.reshape(height, width, channels)
        _copy(unpacked(image), room)
        start = end
    places = _allocated((len(ready), 3), torch.int64)
    places.numpy()[:] = np.column_stack([ends - sizes.prod(1) * channels, sizes])
    return Ragged(data, places, Shapes(sizes, channels, "chw" if planes else "hwc"))


def _copy(pixels: NDArray[np.uint8], room: NDArray[np.uint8]) -> None:
    if pixels.strides[1:] == room.strides[1:]:  # whole rows
        room[:] = pixels
        return
    for channel in range(room.shape[2]):  # NumPy's inner loop is then along a row, not over three values: 4 times as fast
        room[..., channel] = pixels[..., channel]


def _allocated(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    place = _place.get()
    stride = (*shape[1:], 1)
    found = place(shape, stride, dtype) if place is not None else None
    if found is not None:
        return found
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype)
    # As default_collate does: what a worker sends is in shared memory then, and need not be copied there.
    storage = torch.UntypedStorage._new_shared(int(np.prod(shape)) * dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape, stride)  # type: ignore[call-overload, no-any-return]


def _by_member(samples: Sequence[Any], path: str, pack: _Pack) -> Batch:
    first = samples[0]
    names = _names(first)
    for number, sample in enumerate(samples):
        have = _names(sample) if _is_container(sample) else []
        if have != names and not (isinstance(first, Mapping) and set(names) <= set(have)):
            got = f"{', '.join(map(repr, have))}" if have else f"{type(sample).__name__}"
            raise ArgumentError(
                f"Samples must have the members of the first, {', '.join(map(repr, names))}, got {got} in "
                f"{_where(number, path)}. Return samples of one form from the dataset."
            )
    made = {name: _collated([_member(sample, name) for sample in samples], path + _way(first, name), pack) for name in names}
    if type(first) in {tuple, list}:
        return list(made.values())  # of tuples too, as default_collate has it
    return batches.replace(first, made)


def _collated(members: Sequence[Any], path: str, pack: _Pack) -> Any:
    if is_image(members[0]):
        return pack(members, path)
    if _has_views(members[0]):
        return _by_member(members, path, pack)
    if any(_is_target(member) for member in members):
        return list(members)
    try:
        return default_collate(list(members))
    except Exception as error:
        way_out = "What it cannot stack" if isinstance(error, TypeError) else "What differs in size from sample to sample"
        error.add_note(
            f"gpuaug: raised by default_collate for {path} of the samples. {way_out} belongs into a dict there, as boxes do: "
            "{'boxes': …}. The batch then has a list of these dicts."
        )
        raise


def _has_views(value: Any) -> bool:
    return isinstance(value, tuple | list) and any(is_image(member) for member in value)


def _is_target(value: Any) -> bool:
    """Whether ``value`` is what is known of one image: a mapping, or a container of more than numbers and text, or of nothing.

    Of a mapping the keys may be other ones for an image without annotations, so what is in it does not count.
    """
    if not _is_container(value):
        return False
    if isinstance(value, Mapping):
        return True
    inside = [_member(value, name) for name in _names(value)]
    return not inside or not all(isinstance(member, int | float | str | bytes | np.generic) for member in inside)


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping | tuple | list) or batches.is_record(value)


def _names(container: Any) -> list[Any]:
    if isinstance(container, Mapping):
        return list(container)
    if batches.is_record(container):
        return list(container.__dataclass_fields__)
    return list(container._fields) if batches.is_namedtuple(container) else list(range(len(container)))


def _member(container: Any, name: Any) -> Any:
    return container[name] if _by_key(container) else getattr(container, name)


def _way(container: Any, name: Any) -> str:
    return f"[{name!r}]" if _by_key(container) else f".{name}"


def _by_key(container: Any) -> bool:
    return isinstance(container, Mapping) or not (batches.is_record(container) or batches.is_namedtuple(container))


def _where(sample: int, path: str) -> str:
    return f"sample {sample} at {path}" if path else f"sample {sample}"
