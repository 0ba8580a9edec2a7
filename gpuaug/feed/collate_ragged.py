"""``collate_ragged``: packs images, or clips, of any sizes into one flat buffer."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentError, flag, one_of
from gpuaug.core.ragged import ELEMENTS_LIMIT, SIDE_LIMIT, Ragged, Shapes
from gpuaug.feed.collate_members import MemberCollate, allocate_tensor, position_text
from gpuaug.feed.image_input import as_stored, copy_pixels, frames_of, is_clip, is_image, refuse, sizes_of, with_channels


def collate_ragged(samples: Sequence[Any], *, convert: bool = False, channels: Literal[1, 3] | None = 3) -> Batch:
    """Collate samples whose images or clips differ in size: ``DataLoader(dataset, collate_fn=gpuaug.collate_ragged)``.

    Images are PIL images, uint8 arrays (H, W, C) or (H, W), and uint8 tensors (C, H, W), including torchvision's
    ``tv_tensors.Image``. Clips are uint8 arrays (T, H, W, C), and uint8 tensors (T, C, H, W), including ``tv_tensors.Video``;
    all clips of a member have the same T. A sample is an image or clip, or a tuple, list, mapping, named tuple or dataclass
    with one or more images or clips, also in a list or tuple of views. Other members are collated by torch's
    ``default_collate``, except targets: for a member that is a mapping or dataclass, or a list or tuple that holds more than
    numbers and text, the batch has a list of the samples' values.

    Args:
        samples: Samples of the same structure. The first sample determines which members are images or clips.
        convert: Whether to convert images with another number of channels: grey is repeated, an alpha channel is dropped,
            PIL converts palettes and CMYK, and colour is converted to grey by ITU-R 601.
        channels: Number of channels of every image: 3, or 1 for grey. ``None``: all images of a batch must have the number of
            channels and the dtype of the first image. The dtype may then also be uint16 or int16.

    Returns:
        A batch with the structure that ``default_collate`` returns (a list for a tuple), and a ``Ragged`` for each member of
        images or clips. Clips are packed as B · T images with ``shapes.frames`` = T. The layout is ``"chw"`` if the first value
        is a tensor, else ``"hwc"``. In a worker of a ``StreamedLoader``, the memory of the images may be overwritten after the
        batch was copied to the GPU. So a collate function that calls this one must keep no reference to the images.

    Raises:
        ArgumentTypeError: If an image is not uint8 (or uint16 or int16 with ``channels=None``), or if a value that should be an
            image is not.
        ArgumentError: If an image has no pixels, a side of 2**24 or more, or, without ``convert``, another number of channels;
            if a PIL image has a mode of more than 8 bits (``"I;16"`` is accepted with ``channels=None``); if types of images
            differ with ``channels=None``; if a batch has 2**31 values or more, or no sample; if samples differ in structure, or
            clips of a batch in their number of frames.

    Cost:
        On the host, one copy of each image; two of a PIL image, since PIL stores a pixel in four bytes. In a worker of a
        ``StreamedLoader`` the GPU reads the result of this copy. An image with another layout than the first, or with reversed
        channels, takes a few tenths of a millisecond more.

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
    pack = partial(_pack, channels=channels, convert=convert)
    return MemberCollate(partial(_are_images, allow_16_bits=channels is None), pack, refuse)(samples)


def _are_images(values: Sequence[Any], _path: str, *, allow_16_bits: bool) -> bool:
    """Return whether a member holds images or clips. The first value decides."""
    return is_image(values[0], allow_16_bits=allow_16_bits) or is_clip(values[0], allow_16_bits=allow_16_bits)


def _pack(values: Sequence[Any], path: str, *, channels: Literal[1, 3] | None, convert: bool) -> Ragged:
    """Pack the images or clips of a member.

    Args:
        values: (B,) values of the member, one per sample.
        path: Path of the member within a sample, for error messages.
        channels: See ``collate_ragged``.
        convert: See ``collate_ragged``.
    """
    has_clips = is_clip(values[0], allow_16_bits=True)
    images = frames_of(values, path) if has_clips else values
    frames = len(values[0]) if has_clips else 0
    positions = [position_text(number, path) for number in range(len(values)) for _ in range(frames or 1)]
    if channels is None:
        first = as_stored(images[0], None, positions[0])
        others = zip(images[1:], positions[1:], strict=True)
        checked_images = [first, *(as_stored(image, first, position) for image, position in others)]
        num_channels = first.shape[2]
        dtype = first.dtype
    else:
        checked_images = [
            with_channels(image, channels, convert=convert, position=position)
            for image, position in zip(images, positions, strict=True)
        ]
        num_channels = channels
        dtype = np.dtype(np.uint8)
    sizes = sizes_of(checked_images)
    if (sizes >= SIDE_LIMIT).any():
        largest_index = int(np.argmax(sizes)) // 2
        height, width = sizes[largest_index]
        raise ArgumentError(
            f"Images must have sides of fewer than 2**24 pixels, got {height}x{width} in {positions[largest_index]}. "
            "Split the image in the dataset."
        )
    ends = sizes.prod(1).cumsum() * num_channels  # end of each image in the buffer
    if ends[-1] >= ELEMENTS_LIMIT:
        overflowing = int(np.searchsorted(ends, ELEMENTS_LIMIT))
        raise ArgumentError(
            f"The images of a batch must have fewer than 2**31 values, got {ends[overflowing]} up to "
            f"{positions[overflowing]}. Lower batch_size, or downsample large images in the dataset."
        )
    is_planar = isinstance(images[0], Tensor)
    data = allocate_tensor((int(ends[-1]),), getattr(torch, dtype.name))
    flat = data.numpy()
    start = 0
    for image, (height, width), end in zip(checked_images, sizes.tolist(), ends.tolist(), strict=True):
        shape = (num_channels, height, width) if is_planar else (height, width, num_channels)
        target = flat[start:end].reshape(shape)
        copy_pixels(image, target.transpose(1, 2, 0) if is_planar else target)
        start = end
    offsets_and_sizes = allocate_tensor((len(checked_images), 3), torch.int64)
    offsets_and_sizes.numpy()[:] = np.column_stack([ends - sizes.prod(1) * num_channels, sizes])
    return Ragged(data, offsets_and_sizes, Shapes(sizes, num_channels, "chw" if is_planar else "hwc", frames=frames))
