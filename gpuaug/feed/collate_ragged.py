"""``collate_ragged``: packs images, or clips, of any sizes into one flat buffer."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentError, flag, one_of
from gpuaug.core.ragged import MOST_ELEMENTS, MOST_SIDE, Ragged, Shapes
from gpuaug.feed.collate_members import MemberCollate, allocated, where
from gpuaug.feed.image_input import Channels, as_stored, frames_of, is_clip, is_image, prepared, refuse, sizes_of, unpacked


def collate_ragged(samples: Sequence[Any], *, convert: bool = False, channels: Literal[1, 3] | None = 3) -> Batch:
    """Collate samples whose images or clips differ in size: ``DataLoader(dataset, collate_fn=gpuaug.collate_ragged)``.

    Images are PIL images, uint8 arrays (H, W, C) or (H, W), and uint8 tensors (C, H, W), including torchvision's
    ``tv_tensors.Image``. Clips are uint8 arrays (T, H, W, C), and uint8 tensors (T, C, H, W), including ``tv_tensors.Video``;
    all clips of a member have the same T. A sample is an image or clip, or a tuple, list, mapping, named tuple or dataclass
    with one or more of them, also in a list or tuple of views. The other members are collated by torch's ``default_collate``,
    except targets: a mapping, list or tuple in a sample is not collated, and the batch has a list of them with one entry per
    sample. A list or tuple of numbers and text only is collated.

    Args:
        samples: Samples of the same structure. The first sample determines which members are images or clips.
        convert: Whether to convert images with another number of channels: grey is repeated, an alpha channel is dropped,
            PIL converts palettes and CMYK, and colour is converted to grey by ITU-R 601.
        channels: Number of channels of every image: 3, or 1 for grey. ``None``: the number of channels and the dtype of the
            first image, which may then also be uint16 or int16; they must be the same for all images of a batch.

    Returns:
        A batch of the samples' structure, as of ``default_collate`` (a list for a tuple), with a ``Ragged`` for each member of
        images or clips. Clips are packed as B · T images with ``shapes.frames`` = T. The layout is ``"chw"`` if the first value
        is a tensor, else ``"hwc"``. In a worker of a loader with slots it is in a slot, which is overwritten after the batch
        was copied: return it from the collate function and keep no reference.

    Raises:
        ArgumentTypeError: If an image is not uint8 (or uint16 or int16 with ``channels=None``), or if a value that should be an
            image is not.
        ArgumentError: If an image has another number of channels and ``convert`` is false, no pixels, or a side of 2**24 or
            more; if a batch has 2**31 values or more; if clips of a batch differ in their number of frames.

    Cost:
        On the host, one copy of each image into the buffer; two of a PIL image, since PIL stores a pixel in four bytes. In a
        worker of a ``StreamedLoader`` the buffer is the slot that the GPU reads, so there is no other copy. An image of another
        layout than the first, or with reversed channels, takes a few tenths of a millisecond to transpose.

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
    return MemberCollate(partial(_are_packed, deep=channels is None), pack, refuse)(samples)


def _are_packed(members: Sequence[Any], _path: str, *, deep: bool) -> bool:
    return is_image(members[0], deep=deep) or is_clip(members[0], deep=deep)


def _packed(members: Sequence[Any], path: str, *, channels: Channels | None, convert: bool) -> Ragged:
    is_of_clips = is_clip(members[0], deep=True)
    images = frames_of(members, path) if is_of_clips else members
    frames = len(members[0]) if is_of_clips else 0
    samples = [where(number, path) for number in range(len(members)) for _ in range(frames or 1)]
    if channels is None:
        first = as_stored(images[0], None, samples[0])
        ready = [first, *(as_stored(image, first, sample) for image, sample in zip(images[1:], samples[1:], strict=True))]
        count = first.shape[2]
        dtype = first.dtype
    else:
        ready = [
            prepared(image, channels, convert=convert, where=sample) for image, sample in zip(images, samples, strict=True)
        ]
        count = channels
        dtype = np.dtype(np.uint8)
    sizes = sizes_of(ready)
    if (sizes >= MOST_SIDE).any():
        longest = int(np.argmax(sizes)) // 2
        height, width = sizes[longest]
        raise ArgumentError(
            f"Images must have sides of fewer than 2**24 pixels, got {height}x{width} in {samples[longest]}. "
            "Cut it up in the dataset."
        )
    ends = sizes.prod(1).cumsum() * count
    if ends[-1] >= MOST_ELEMENTS:
        overflowing = int(np.searchsorted(ends, MOST_ELEMENTS))
        raise ArgumentError(
            f"The images of a batch must have fewer than 2**31 values, got {ends[overflowing]} up to "
            f"{samples[overflowing]}. Lower batch_size, or have the dataset shrink its largest images."
        )
    planes = isinstance(images[0], Tensor)
    data = allocated((int(ends[-1]),), getattr(torch, dtype.name))
    flat = data.numpy()
    start = 0
    for image, (height, width), end in zip(ready, sizes.tolist(), ends.tolist(), strict=True):
        part = flat[start:end]
        target = part.reshape(count, height, width).transpose(1, 2, 0) if planes else part.reshape(height, width, count)
        _copy(unpacked(image), target)
        start = end
    places = allocated((len(ready), 3), torch.int64)
    places.numpy()[:] = np.column_stack([ends - sizes.prod(1) * count, sizes])
    return Ragged(data, places, Shapes(sizes, count, "chw" if planes else "hwc", frames=frames))


def _copy(pixels: NDArray[Any], target: NDArray[Any]) -> None:
    if pixels.strides[1:] == target.strides[1:]:  # whole rows
        target[:] = pixels
        return
    for channel in range(target.shape[2]):  # NumPy's inner loop is then along a row, not over three values: 4 times as fast
        target[..., channel] = pixels[..., channel]
