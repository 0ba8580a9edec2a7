"""Private names of Kornia that gpuaug reads or writes. Tried with Kornia 0.9.0.

Private names of Kornia's policies are read in ``policies/auto_augment.py``.

Kornia publishes neither the ranges that a module draws from nor the order of a jitter, which an op must know before it draws.
"""

import copy
import functools
from collections.abc import Iterator
from typing import Any

from kornia import augmentation as K
from kornia.augmentation import random_generator
from kornia.enhance import jpeg
from kornia.filters import median
from torch import Tensor

from gpuaug.core.settings import on_host
from gpuaug.core.torchvision_types import class_of, names_used


def generator_of(module: Any) -> Any:
    """Return the parameter generator of a module, whose attributes are the distributions of the parameters."""
    return module._param_generator


def bounds(distribution: Any) -> tuple[float, float]:
    """(lower, upper) bound of a uniform distribution of Kornia."""
    return float(distribution.low), float(distribution.high)


def sampler_bounds(module: Any, parameter: str) -> tuple[float, float] | None:
    """``bounds`` of a parameter, by the name of its distribution in the generator; ``None`` if the module does not draw it."""
    generator = generator_of(module)
    is_plain = hasattr(generator, "sampler_dict")  # a ``PlainUniformGenerator``
    distribution = generator.sampler_dict[parameter] if is_plain else getattr(generator, f"{parameter}_sampler")
    return None if distribution is None else bounds(distribution)


def foreign_generator(module: Any, base: type) -> str | None:
    """Reason if the user has replaced the parameter generator of ``module``, of Kornia's class ``base``; else ``None``."""
    generator = generator_of(module) if "_param_generator" in names_used(base) else None
    if generator is None or class_of(generator, _generator_classes(base)) is not None:
        return None
    return f"its _param_generator, {type(generator).__name__}, is not the generator of {base.__name__}"


@functools.cache
def _generator_classes(base: type) -> tuple[type, ...]:
    """Return Kornia's classes of parameter generators that the code of Kornia's class ``base`` names."""
    return tuple(getattr(random_generator, name) for name in names_used(base) if hasattr(random_generator, name))


def jitter_order(module: Any) -> tuple[int, ...] | None:
    """Order of the adjustments of a jitter, which the user has set; ``None`` for a random order."""
    order: tuple[int, ...] | None = module._fixed_order
    return order


def state_of_last_call(module: Any) -> Iterator[Any]:
    """Yield the attributes with which a module remembers its last call, which may be large."""
    names = (
        *("_output_image", "_params", "_transform_matrix", "_transform_matrices"),
        *("_transform_matrix_params", "_transform_matrix_params_snapshot"),
    )
    attributes = getattr(module, "__dict__", {})
    yield from (attributes[name] for name in names if attributes.get(name) is not None)


def with_frames_second(video: K.VideoSequential) -> K.VideoSequential:
    """Return a copy of a container that takes clips as (B, T, C, H, W). The modules are shared."""
    copied = copy.copy(video)
    vars(copied).update(data_format="BTCHW", _temporal_channel=1)
    return copied


def median_of_square(images: Tensor, side: int) -> Tensor:
    """Median of ``side`` x ``side`` pixels, 3 or 5, for images (B, C, H, W). Kornia's function convolves on a GPU, in TF32."""
    medians: Tensor = median._median_blur_network(images, side)
    return medians


def coded_as_jpeg(images: Tensor, quality: Tensor) -> Tensor:
    """Compress and decompress images, (B, 3, H, W) in [0, 1], with a quality per image, (B,).

    This is ``kornia.enhance.jpeg_codec_differentiable`` without its check of the qualities, for which the host waits.
    """
    height, width = images.shape[2:]
    padded = jpeg._perform_padding(images)[0]
    luma_steps, chroma_steps = jpeg._default_quantization_tables(images.device, images.dtype)
    tables = {"quantization_table_y": luma_steps[None], "quantization_table_c": chroma_steps[None]}
    with on_host():  # Kornia creates tensors on the default device, and reads them
        coefficients = jpeg._jpeg_encode(padded, quality, **tables)
        decoded: Tensor = jpeg._jpeg_decode(*coefficients, quality, *padded.shape[2:], **tables)
    return decoded[:, :, :height, :width]
