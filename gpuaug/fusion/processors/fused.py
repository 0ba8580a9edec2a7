"""``FusedProcessor``: the module that ``gpuaug.fuse`` returns for an image processor."""

import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpuaug.core.encoded import ClipHeaders, Encoded
from gpuaug.core.errors import ArgumentError, ArgumentTypeError, DecodeError, shown
from gpuaug.core.ragged import Ragged, Shapes
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.options import Options
from gpuaug.fusion.processors.families import Images, PaddedImages, PaddedPatches, Patches, Sizes
from gpuaug.fusion.processors.read import TESTED, Definition, read

Output = Images | PaddedImages | Patches | PaddedPatches


class FusedProcessor(nn.Module):
    """An image processor of transformers in one launch, returned by ``gpuaug.fuse``.

    It resizes, normalizes and writes the images of a ragged batch in the order of the processor. It draws no random numbers,
    and has no parameters.
    """

    draws_only_from_seed = True
    """True, because there are no random numbers."""

    def __init__(self, definition: Definition, dtype: torch.dtype) -> None:
        super().__init__()
        self.definition = (definition, dtype)
        """Settings and output dtype. They determine the output for a batch. Loader states contain their text."""

    def grids(self, images: Encoded | Ragged) -> Tensor:
        """Return what the processor returns about the sizes of images, from the sizes alone.

        A collate function calls this method on the result of ``collate_encoded``, to insert one placeholder per patch into the
        text.

        Args:
            images: Encoded images, of which only the headers are read, with EXIF orientations applied; or a ragged batch. A
                ``DecodeStage`` must then decode whole images: without ``min_side``, ``scale`` and ``exif=False``.

        Shape:
            - returns: (N, k) int64 on the CPU. Qwen2-VL: (N, 3) ``image_grid_thw``. SigLIP2: (N, 2) ``spatial_shapes``.
              Pixtral: (N, 2) ``image_sizes``. Other processors: (N, 2) heights and widths of the output.

        Raises:
            ArgumentTypeError: If ``images`` are neither encoded nor ragged images.
            DecodeError: If the header of an image cannot be read.
            ArgumentError: If the processor does not accept the size of an image.

        Cost:
            Host time only: about 0.1 ms per batch.
        """
        family = self.definition[0].family
        return torch.from_numpy(np.array(family.grids(family.targets(_sizes(images)))))

    def forward(self, images: Ragged) -> Output:
        """Process a batch.

        Args:
            images: Ragged batch of uint8 images of 3 channels: whole images.

        Returns:
            Named tuple with the names, shapes and dtypes of the processor's result, on the device of the images.
            ``pixel_values`` has the dtype that was passed to ``fuse``, by default float32.

        Raises:
            ArgumentTypeError: If ``images`` is not a ragged batch.
            ArgumentError: If the images do not have 3 channels of bytes, are frames of clips, or if the processor does not
                accept the size of an image.

        Cost:
            One launch, and one asynchronous copy of the sizes. For SigLIP2 and Pixtral also a fill with zeros.
        """
        if not isinstance(images, Ragged):
            raise ArgumentTypeError(
                f"images must be a gpuaug.Ragged, got {shown(images)}. Return gpuaug.collate_ragged(…) from collate_fn, or "
                "pass gpuaug.DecodeStage() before this stage."
            )
        definition, dtype = self.definition
        arrangement = definition.family.arrangement(_sizes(images))
        return definition.family.Output(*dispatch.write_patches(images, arrangement, definition.resampling, dtype))

    def extra_repr(self) -> str:
        """Class of the processor and output dtype."""
        return f"{self.definition[0].name}, {self.definition[1]}"


def fuse_processor(processor: Any, options: Options) -> FusedProcessor:
    """Return the module for an image processor, for ``gpuaug.fuse``.

    Raises:
        ArgumentTypeError: If the exact type of the processor is not supported.
        ArgumentError: If a setting or an option is not supported, or a version of transformers that was not tested returns
            another result.
    """
    definition = read(processor)
    if options != Options(dtype=options.dtype, ragged=True) or options.dtype is torch.uint8:
        raise ArgumentError(
            "An image processor must be fused with ragged=True, and of the other arguments at most a dtype of floats, got "
            f"{options}. Write gpuaug.fuse(processor, ragged=True)."
        )
    fused = FusedProcessor(definition, options.dtype or torch.float32)
    version = str(getattr(sys.modules.get("transformers"), "__version__", "an unknown version"))
    if version not in TESTED and not _is_equal(processor, FusedProcessor(definition, torch.float32)):
        raise ArgumentError(
            f"transformers must be {' or '.join(TESTED)} or return the same values, got {version}, whose "
            f"{type(processor).__name__} returns others. Install a tested version, or call the processor in the dataset."
        )
    return fused


def _is_equal(processor: Any, fused: FusedProcessor) -> bool:
    """Return whether a processor and its module return the same names, shapes and values for two small images.

    The images have no edges. On a CPU, where torchvision rounds to bytes after each axis, values then differ by at most one
    level.
    """
    images = []
    for height, width in ((40, 64), (72, 48)):
        y, x, channel = (torch.arange(side, device="cpu") for side in (height, width, 3))
        images.append((20 + 2 * y[:, None] + x + 20 * channel[:, None, None]).to(torch.uint8))
    sizes = np.array([image.shape[1:] for image in images])
    areas = sizes.prod(1) * 3
    image_layouts = torch.from_numpy(np.column_stack([areas.cumsum() - areas, sizes]))
    batch = Ragged(torch.cat([image.flatten() for image in images]), image_layouts, Shapes(sizes, 3, "chw"))
    result = fused(batch)._asdict()
    expected = dict(processor(images, return_tensors="pt"))
    value_of_level = fused.definition[0].resampling.levels
    one_level = (value_of_level[:, 1] - value_of_level[:, 0]).abs().max().item() * 1.01
    return expected.keys() == result.keys() and all(
        value.shape == result[name].shape
        and value.dtype == result[name].dtype
        and torch.allclose(value.double(), result[name].double(), rtol=0, atol=one_level if name == "pixel_values" else 0)
        for name, value in expected.items()
    )


def _sizes(images: Encoded | Ragged) -> Sizes:
    """Return the sizes of upright images.

    Raises:
        ArgumentTypeError: If ``images`` are neither encoded nor ragged images.
        ArgumentError: If ragged images do not have 3 channels of bytes, are frames of clips, or are not whole.
        DecodeError: If the header of an image cannot be read.
    """
    if isinstance(images, Ragged):
        shapes = images.shapes
        if shapes.channels != 3 or images.data.dtype != torch.uint8 or shapes.frames:
            raise ArgumentError(
                f"images must be images of 3 channels of uint8, and no clips, got {images} of {images.data.dtype}. "
                "Pass gpuaug.DecodeStage() or gpuaug.collate_ragged with its default channels."
            )
        if shapes.windows is not None:
            raise ArgumentError(
                f"images must be whole images, got windows of {images}. Remove the crop between DecodeStage and this stage."
            )
        return shapes.sizes
    if not isinstance(images, Encoded) or isinstance(images.headers, ClipHeaders):
        raise ArgumentTypeError(
            f"images must be the result of gpuaug.collate_encoded or collate_ragged for images, got {shown(images)}. "
            "Call grids in the collate function."
        )
    for index, problem in images.headers.problems.items():
        name = images.headers.names[index] or f"image {index}"
        raise DecodeError(f"The size of {name} cannot be read, because of its header: {problem}. Leave it out of the dataset.")
    table = images.headers.table
    sizes: NDArray[np.int64] = np.stack([table["height"], table["width"]], 1).astype(np.int64)
    return np.where(table["orientation"][:, None] > 4, sizes[:, ::-1], sizes)
