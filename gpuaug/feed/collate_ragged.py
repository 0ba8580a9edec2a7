"""``collate_ragged``: the images of a batch, whatever their sizes, in one flat buffer."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentError, flag, one_of
from gpuaug.core.limits import MOST_ELEMENTS, MOST_SIDE
from gpuaug.core.ragged import Ragged, Shapes
from gpuaug.feed.collate_members import MemberCollate, allocated, where
from gpuaug.feed.image_input import Channels, as_stored, is_image, prepared, refuse, sizes_of, unpacked


def collate_ragged(samples: Sequence[Any], *, convert: bool = False, channels: Channels | None = 3) -> Batch:
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
        channels: Of every image: 3, or 1 for grey ones. ``None``: as many as the first image has, in its type, which may then
            also be uint16 or int16; all of a batch have the same.

    Returns:
        A batch of the samples' form, as ``default_collate`` gives it (a list for a tuple), with a ``Ragged`` for each
        member that is an image: its layout ``"chw"`` if the first one is a tensor, else ``"hwc"``. In a worker of a loader
        with slots it lies in one, which is overwritten after the batch was copied: return it from the collate function, and
        keep nothing of it there.

    Raises:
        ArgumentTypeError: If an image is not uint8, or uint16 or int16 with ``channels=None``, or none is where one is
            expected.
        ArgumentError: If an image has other channels than the batch and ``convert`` is false, no pixels, or a side of 2**24 or
            more; if a batch has 2**31 values or more.

    Cost:
        On the host, one copy of each image into the buffer; of a PIL image two, since PIL keeps a pixel in four bytes. In a
        worker of a ``StreamedLoader`` the buffer is the slot that the GPU reads, so there is no other. Images of another
        layout than the first one's, or with their channels reversed, take some tenths of a millisecond each to be turned.

    Examples:
        >>> small, large = torch.zeros(3, 2, 2, dtype=torch.uint8), torch.ones(3, 4, 5, dtype=torch.uint8)
        >>> images, labels = collate_ragged([(small, 0), (large, 1)])
        >>> images
        Ragged(2 images of 3 channels, chw, cpu)
        >>> images[1].shape, labels
        (torch.Size([3, 4, 5]), tensor([0, 1]))
    """
    channels = one_of("channels", channels, (1, 3, None), "Leave it out for RGB.")
    convert = flag("convert", convert, "True converts images of other channels.")
    if convert and channels is None:
        raise ArgumentError("convert must be left out with channels=None, got True. Pass channels=3 to convert images to RGB.")
    pack = partial(_packed, channels=channels, convert=convert)
    return MemberCollate(lambda members, _: is_image(members[0], deep=channels is None), pack, refuse)(samples)


def _packed(images: Sequence[Any], path: str, *, channels: Channels | None, convert: bool) -> Ragged:
    if channels is None:
        first = as_stored(images[0], None, where(0, path))
        ready = [first, *(as_stored(image, first, where(i, path)) for i, image in enumerate(images[1:], 1))]
        count = first.shape[2]
        dtype = first.dtype
    else:
        ready = [prepared(image, channels, convert=convert, where=where(i, path)) for i, image in enumerate(images)]
        count = channels
        dtype = np.dtype(np.uint8)
    sizes = sizes_of(ready)
    if (sizes >= MOST_SIDE).any():
        longest = int(np.argmax(sizes)) // 2
        height, width = sizes[longest]
        raise ArgumentError(
            f"Images must have sides of fewer than 2**24 pixels, got {height}x{width} in {where(longest, path)}. "
            "Cut it up in the dataset."
        )
    ends = sizes.prod(1).cumsum() * count
    if ends[-1] >= MOST_ELEMENTS:
        overflowing = int(np.searchsorted(ends, MOST_ELEMENTS))
        raise ArgumentError(
            f"The images of a batch must have fewer than 2**31 values, got {ends[overflowing]} up to "
            f"{where(overflowing, path)}. Lower batch_size, or have the dataset shrink its largest images."
        )
    planes = isinstance(images[0], Tensor)
    data = allocated((int(ends[-1]),), getattr(torch, dtype.name))
    flat = data.numpy()
    start = 0
    for image, (height, width), end in zip(ready, sizes.tolist(), ends.tolist(), strict=True):
        part = flat[start:end]
        room = part.reshape(count, height, width).transpose(1, 2, 0) if planes else part.reshape(height, width, count)
        _copy(unpacked(image), room)
        start = end
    places = allocated((len(ready), 3), torch.int64)
    places.numpy()[:] = np.column_stack([ends - sizes.prod(1) * count, sizes])
    return Ragged(data, places, Shapes(sizes, count, "chw" if planes else "hwc"))


def _copy(pixels: NDArray[Any], room: NDArray[Any]) -> None:
    if pixels.strides[1:] == room.strides[1:]:  # whole rows
        room[:] = pixels
        return
    for channel in range(room.shape[2]):  # NumPy's inner loop is then along a row, not over three values: 4 times as fast
        room[..., channel] = pixels[..., channel]
