"""Triton kernels that mix samples, or channels: MixUp and CutMix of images and of class probabilities; shuffles and grey.

MixUp and CutMix mix each sample with its *partner*, another sample of the batch. Channel shuffles and conversions to grey run
here for images whose number of channels is not three.

A *row* is a sample's row of the parameter table. The suffixes ``_b``, ``_c``, ``_h`` and ``_W`` denote strides, in elements, of
the axes batch, channel, line and x; ``_k`` of the axis of classes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.filters.frame import load_exact, load_exact_pixels
from gpuaug.fusion.backends.triton.launch import Launch, kernel, launch_for, on_device, output_constants
from gpuaug.fusion.backends.triton.pixel_math import store_channels, to_output_type
from gpuaug.fusion.backends.triton.points import apply_point_ops
from gpuaug.fusion.backends.triton.taps import select_sample
from gpuaug.fusion.ops.base import FrontOp
from gpuaug.fusion.ops.channel import Grayscale
from gpuaug.fusion.ops.mix import MixOp, SoftLabels
from gpuaug.fusion.program.plan import OpPass

TILE = 1024
"""Consecutive pixels per thread block."""

MAX_BLOCK_CLASSES = 1024
"""Maximum number of classes per thread block."""


@triton.jit
def mix_with_partner(value, partner_pixel, in_bounds, pasted, weight, BYTES: tl.constexpr):
    """Mix one channel of an image with the same channel of its partner. Return (TILE,) float32 in [0, 1].

    The result is the partner's value where ``pasted`` is true, and elsewhere a mean in which the partner has ``weight``.

    ``value``: pixels of the image, (TILE,) float32 in [0, 1]. ``partner_pixel``: addresses of the pixels of the partner.
    ``in_bounds``: mask of the pixels of the block that are in the image. ``BYTES``: whether the partner's pixels are uint8.
    """
    # Only pixels of the partner that the result depends on are loaded.
    partner_value = load_exact(partner_pixel, BYTES, tl.where(weight != 0, in_bounds, pasted))
    # With a weight of 0, pixels remain unchanged, bit for bit.
    return tl.where(pasted, partner_value, tl.where(weight != 0, value * (1 - weight) + partner_value * weight, value))


@kernel
def mix_kernel(
    source, out, param_table, height, width, row_stride, source_b, source_c, source_h, out_b, out_c, out_h,
    SOURCE_W: tl.constexpr, FRAMES: tl.constexpr, BYTES: tl.constexpr, OUT_W: tl.constexpr,
    PROGRAM: tl.constexpr, OP_COUNT: tl.constexpr, CHANNELS: tl.constexpr, RGB: tl.constexpr, TILE: tl.constexpr,
    ROUTE_COLUMN: tl.constexpr,
):  # fmt: skip
    """Mix each image with its partner, and each frame of a clip with the frame of the same index of the partner.

    ``image`` counts the images of the batch, or the frames of all clips. A row of ``param_table`` has these columns: apply mask
    (0 to skip the mix), index of the partner, weight of the partner's label, weight of the partner's pixels, and left, top,
    right, bottom of the rectangle that is copied from the partner, in pixels.

    Constants, in addition to ``output_constants`` of ``launch.py``:
        FRAMES: Number of frames per clip, which share a row; 1 for images.
        RGB: Whether a block computes three channels, r, g and b; otherwise it computes channel ``plane``, in ``r`` alone.
        TILE: Number of consecutive pixels per thread block.
        ROUTE_COLUMN: Not used: all images are read from one buffer and written to another, also images that are not mixed.

    Grid: (tiles per image, images, planes; with ``RGB`` one plane).
    """
    image = tl.program_id(1)
    plane = tl.program_id(2)
    row = param_table + image // FRAMES * row_stride
    pixel_index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    in_bounds = pixel_index < height * width
    x = pixel_index % width
    y = pixel_index // width
    pixel_of_first_image = source + plane * source_c + y * source_h + x * SOURCE_W
    pixel = pixel_of_first_image + image.to(tl.int64) * source_b
    r, g, b = load_exact_pixels(pixel, in_bounds, source_c, BYTES, RGB, X_LAST=True)
    if tl.load(row) != 0:
        partner_pixel = pixel_of_first_image + (tl.load(row + 1).to(tl.int64) * FRAMES + image % FRAMES) * source_b
        weight = tl.load(row + 3)
        pasted = in_bounds & (x >= tl.load(row + 4)) & (x < tl.load(row + 6)) & (y >= tl.load(row + 5)) & (y < tl.load(row + 7))
        r = mix_with_partner(r, partner_pixel, in_bounds, pasted, weight, BYTES)
        if RGB:
            g = mix_with_partner(g, partner_pixel + source_c, in_bounds, pasted, weight, BYTES)
            b = mix_with_partner(b, partner_pixel + 2 * source_c, in_bounds, pasted, weight, BYTES)
    # 0.0 stands in for the mean grey of the image, which no op of this pass uses.
    r, g, b = apply_point_ops(r, g, b, x, y, image, plane, width, row, 0.0, PROGRAM, OP_COUNT, CHANNELS, RGB)
    out_pixel = out + image.to(tl.int64) * out_b + plane * out_c + y * out_h + x * OUT_W
    store_channels(out_pixel, out_c, r, g, b, in_bounds, RGB)


def mix_launch(pass_: OpPass[MixOp], source: Tensor, param_table: Tensor, out: Tensor) -> Launch:
    """Prepare the launch of a pass that begins with a mix."""
    batch, _, height, width = source.shape
    constants, planes = output_constants(pass_, source, out)
    integers = (height, width, param_table.stride(0), *source.stride()[:3], *out.stride()[:3])
    return Launch(mix_kernel, (triton.cdiv(height * width, TILE), batch, planes), integers, {**constants, "TILE": TILE})


@triton.jit
def class_probabilities(
    label_address, index, in_bounds, label_k,
    DENSE: tl.constexpr, DENSE_FACTOR: tl.constexpr, ON_VALUE: tl.constexpr, OFF_VALUE: tl.constexpr,
):  # fmt: skip
    """Return the probabilities of the classes ``index`` in the label of one sample, float32 in the shape of the indices.

    ``label_address``: address of the label: a class index, or, with ``DENSE``, probabilities with stride ``label_k``.
    ``in_bounds``: mask of the class indices that exist. Constants: see ``labels_kernel``.
    """
    if DENSE:
        return tl.load(label_address + index * label_k, mask=in_bounds, other=0).to(tl.float32) * DENSE_FACTOR + OFF_VALUE
    label = tl.load(label_address)
    # As float32, because half precision cannot represent all class indices.
    is_class = (label.to(tl.float32) == index.to(tl.float32)) if label.dtype.is_floating() else (label.to(tl.int64) == index)
    return tl.where(is_class, ON_VALUE, OFF_VALUE)


@kernel
def labels_kernel(
    labels, param_table, out, row_stride, label_b, label_k,
    CLASSES: tl.constexpr, DENSE: tl.constexpr, MIXED: tl.constexpr, DENSE_FACTOR: tl.constexpr, ON_VALUE: tl.constexpr,
    OFF_VALUE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Convert labels to class probabilities, and mix the probabilities of each sample with its partner's.

    Tensors, by their address:
        labels: (B,) class indices, or (B, ``CLASSES``) probabilities, with strides ``label_b`` and ``label_k``.
        param_table: With ``MIXED``, parameters of the mix, one row of ``row_stride`` elements per sample: the first three
            columns are apply mask, index of the partner, and weight of the partner's label.
        out: (B, ``CLASSES``) class probabilities.

    Constants:
        BLOCK: Number of classes per thread block.
        DENSE: Whether labels are probabilities, with stride ``label_k``, instead of class indices.
        ON_VALUE, OFF_VALUE: Smoothed probability of the labelled class, and of every other class.
        DENSE_FACTOR: Factor of the probabilities of a dense label, to which ``OFF_VALUE`` is added.
        MIXED: Whether labels are mixed. Otherwise ``param_table`` is not read.

    Grid: (blocks of classes, samples).
    """
    sample = tl.program_id(1).to(tl.int64)
    class_index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = class_index < CLASSES
    probabilities = class_probabilities(
        labels + sample * label_b, class_index, in_bounds, label_k, DENSE, DENSE_FACTOR, ON_VALUE, OFF_VALUE
    )
    if MIXED:
        row = param_table + sample * row_stride
        weight = tl.load(row + 2)
        if weight != 0:  # a sample that skips the mix also has weight 0 (``MixOp.write_rows``)
            partner_label = labels + tl.load(row + 1).to(tl.int64) * label_b
            partner_probabilities = class_probabilities(
                partner_label, class_index, in_bounds, label_k, DENSE, DENSE_FACTOR, ON_VALUE, OFF_VALUE
            )
            probabilities = probabilities * (1 - weight) + partner_probabilities * weight
    tl.store(out + sample * CLASSES + class_index, probabilities.to(out.dtype.element_ty), mask=in_bounds)


def soft_labels(soft: SoftLabels, labels: Tensor, param_table: Tensor | None) -> Tensor:
    """Return class probabilities, as ``gpuaug.fusion.ops.mix.SoftLabels.convert`` does, in one launch on the current stream.

    Args:
        soft: Number of classes, smoothing, and dtype of the probabilities.
        labels: Class indices, or probabilities.
        param_table: Parameters of the mix; ``None`` if labels are not mixed.

    Shape:
        - labels: (B,) or (B, K), any strides
        - param_table: (B, columns of the mix), float32
        - returns: (B, K) for K classes
    """
    batch = labels.shape[0]
    out = torch.empty((batch, soft.classes), dtype=soft.type_of(labels), device=labels.device)
    if labels.dtype == torch.bool:  # the kernel reads booleans as bytes, 0 and 1
        labels = labels.view(torch.uint8)
    is_dense = labels.ndim == 2
    block = min(triton.next_power_of_2(soft.classes), MAX_BLOCK_CLASSES)
    smoothing = soft.scale, soft.label_probability, soft.other_probability
    launch = launch_for(
        labels_kernel, (labels.dtype, out.dtype), (soft.classes, is_dense, param_table is not None, *smoothing, block)
    )
    with on_device(labels.device):
        launch(
            (labels, labels if param_table is None else param_table, out),  # labels stand in for a table that is not read
            (triton.cdiv(soft.classes, block), batch, 1),
            (0 if param_table is None else param_table.stride(0), labels.stride(0), labels.stride(1) if is_dense else 0),
        )
    return out


@kernel
def channels_kernel(
    source, out, param_table, height, width, row_stride, source_b, source_c, source_h, out_b, out_c, out_h,
    SOURCE_W: tl.constexpr, FRAMES: tl.constexpr, BYTES: tl.constexpr, OUT_W: tl.constexpr, PROGRAM: tl.constexpr,
    OP_COUNT: tl.constexpr, CHANNELS: tl.constexpr, OUT_CHANNELS: tl.constexpr, RGB: tl.constexpr, TO_GREY: tl.constexpr,
    TILE: tl.constexpr, ROUTE_COLUMN: tl.constexpr,
):  # fmt: skip
    """Compute all output channels of a tile of ``TILE`` consecutive pixels.

    With ``TO_GREY``, each output channel is the weighted sum of the source channels; without, it is one of the source channels.
    Columns of a row: apply mask (0 to skip the op); then per source channel its weight with ``TO_GREY``, else per output
    channel the index of its source channel.

    ``OUT_CHANNELS``, the number of output channels, differs from ``CHANNELS`` only if the op applies to all samples. ``RGB`` is
    false: each channel is computed on its own. Other constants: see ``output_constants`` in ``launch.py``.

    Grid: (tiles per image, samples, 1).
    """
    skipped, sample, first_plane, row, pointer, out = select_sample(
        source, out, param_table, row_stride, source_b, source_c, out_b, FRAMES, ROUTE_COLUMN
    )
    if skipped:
        return
    pixel_index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    in_bounds = pixel_index < height * width
    x = pixel_index % width
    y = pixel_index // width
    source_pixel = pointer + y * source_h + x * SOURCE_W
    applies = tl.load(row) != 0
    grey = tl.zeros((TILE,), tl.float32)
    if TO_GREY and applies:
        for channel in range(CHANNELS):
            grey += load_exact(source_pixel + channel * source_c, BYTES, in_bounds) * tl.load(row + 1 + channel)
    for channel in range(OUT_CHANNELS):
        plane = first_plane + channel
        if TO_GREY and applies:
            pixels = grey
        else:
            source_plane = plane
            if applies:
                source_plane = tl.load(row + 1 + plane).to(tl.int32)
            pixels = load_exact(source_pixel + source_plane * source_c, BYTES, in_bounds)
        # 0.0: mean of the image, which no op of this pass uses.
        pixels, _, _ = apply_point_ops(
            pixels, pixels, pixels, x, y, sample, plane, width, row, 0.0, PROGRAM, OP_COUNT, OUT_CHANNELS, RGB
        )  # fmt: skip
        out_pixel = out + plane * out_c + y * out_h + x * OUT_W
        tl.store(out_pixel, to_output_type(pixels, out.dtype.element_ty), mask=in_bounds)


def channels_launch(pass_: OpPass[FrontOp], source: Tensor, param_table: Tensor, out: Tensor) -> Launch:
    """Prepare the launch of a pass that begins with a channel shuffle or a conversion to grey."""
    batch, _, height, width = source.shape
    constants, _ = output_constants(pass_, source, out)
    constants |= {"OUT_CHANNELS": out.shape[1], "RGB": False, "TO_GREY": isinstance(pass_.front, Grayscale), "TILE": TILE}
    integers = (height, width, param_table.stride(0), *source.stride()[:3], *out.stride()[:3])
    return Launch(channels_kernel, (triton.cdiv(height * width, TILE), batch, 1), integers, constants)
