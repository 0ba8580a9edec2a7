"""Triton kernel that chooses the crop windows of torchvision's ``v2.RandomIoUCrop``, by the boxes of the images.

A *trial* is a random window, which an image accepts if a box of the image overlaps it enough, with its centre inside. A *round*
is a number of trials with one minimum overlap (intersection over union), which is drawn per round. The window of an image is
the first accepted trial of all rounds; with a minimum overlap of 1 or more, the round accepts the whole image. The torch form
of the kernel is ``IoUCrop.windows``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuaug.fusion.backends.triton.boxes import minimum
from gpuaug.fusion.backends.triton.crops import bits24_of, splitmix64_mix, uniform_of
from gpuaug.fusion.backends.triton.launch import kernel, launch_for, on_device
from gpuaug.fusion.backends.triton.pixel_math import maximum
from gpuaug.fusion.ops.geometry import BoxCropOp
from gpuaug.fusion.ops.sampler import SPLITMIX_INCREMENT
from gpuaug.fusion.ops.torchvision.iou_crop import ROUNDS, SEED_LENGTH, IoUCrop

TRIALS_PER_BLOCK = 256
"""Number of trials that a thread block computes at once. It repeats with the next trials until one is accepted."""

BOXES_PER_BLOCK = 128
"""Boxes whose owners a thread block reads at once."""

_INCREMENT, _SEED_LENGTH, _TRIAL_ROUNDS = tl.constexpr(SPLITMIX_INCREMENT), tl.constexpr(SEED_LENGTH), tl.constexpr(ROUNDS)


@triton.jit
def random_pair(seed, index):
    """Return two uniform numbers in [0, 1), from the highest and the lowest 24 bits of word ``index`` of SplitMix64."""
    bits = splitmix64_mix(seed + (index + 1).to(tl.uint64) * _INCREMENT)
    return uniform_of((bits >> 40) & 0xFFFFFF), uniform_of(bits & 0xFFFFFF)


@triton.jit
def trial_window(seed, trial, width, height, MIN_SCALE: tl.constexpr, SCALE_RANGE: tl.constexpr, TRIALS: tl.constexpr):
    """Return left, top, width and height of the window of each trial, in pixels of an image of ``width`` x ``height``.

    ``seed``: seed of the image, uint64. ``trial``: indices of the trials, counted over all rounds. ``TRIALS``: trials per
    round. ``MIN_SCALE``, ``SCALE_RANGE``: see ``box_windows_kernel``.
    """
    scale_x, scale_y = random_pair(seed, trial)
    offset_x, offset_y = random_pair(seed, trial + _TRIAL_ROUNDS * TRIALS)
    window_width = tl.floor(width * (scale_x * SCALE_RANGE + MIN_SCALE))
    window_height = tl.floor(height * (scale_y * SCALE_RANGE + MIN_SCALE))
    return (
        tl.floor((width - window_width) * offset_x),
        tl.floor((height - window_height) * offset_y),
        window_width,
        window_height,
    )


@triton.jit
def load_corners(box, is_owned, width, height):
    """Load the corners (x1, y1, x2, y2) of boxes at address ``box``, clamped to an image of ``width`` x ``height``.

    Coordinates that are NaN stay NaN. ``is_owned``: whether a box belongs to the image. The corners of other boxes are NaN, so
    that these are inside no window.
    """
    nan = float("nan")
    x1 = minimum(maximum(tl.load(box, mask=is_owned, other=nan), 0.0), width)
    y1 = minimum(maximum(tl.load(box + 1, mask=is_owned, other=nan), 0.0), height)
    x2 = minimum(maximum(tl.load(box + 2, mask=is_owned, other=nan), 0.0), width)
    y2 = minimum(maximum(tl.load(box + 3, mask=is_owned, other=nan), 0.0), height)
    return x1, y1, x2, y2


@triton.jit
def has_centre(left, top, window_width, window_height, x1, y1, x2, y2):
    """Return whether the centre of a box is inside a window, not on its edge."""
    centre_x = 0.5 * (x1 + x2)
    centre_y = 0.5 * (y1 + y2)
    return (left < centre_x) & (centre_x < left + window_width) & (top < centre_y) & (centre_y < top + window_height)


@kernel
def box_windows_kernel(
    uniforms, image_sizes, boxes, owners, windows, valid,
    box_count, uniforms_stride, uniform_stride, sizes_stride, size_stride,
    TRIALS: tl.constexpr, MIN_SCALE: tl.constexpr, SCALE_RANGE: tl.constexpr, MIN_RATIO: tl.constexpr, MAX_RATIO: tl.constexpr,
    TRIALS_PER_BLOCK: tl.constexpr, BOXES_PER_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the first valid trial of an image to ``windows``, and the mask of its boxes that stay valid to ``valid``.

    Tensors are the arguments and results of ``IoUCrop.windows``, by their address, with strides in elements: ``uniforms``, two
    numbers of the seed, then the minimum overlap of each round, per image; ``image_sizes``, (width, height) per image;
    ``boxes``, XYXY in pixels; ``owners``, index of the image of each box. A thread block chooses the window of one image.

    Constants:
        TRIALS: Number of trials per round.
        MIN_SCALE, SCALE_RANGE: Lower bound and range of the ratio of a side of a window to the side of the image.
        MIN_RATIO, MAX_RATIO: Bounds of the ratio of width and height of a window.
        TRIALS_PER_BLOCK, BOXES_PER_BLOCK: Described in this module.

    Grid: (images, 1, 1).
    """
    image = tl.program_id(0)
    row = uniforms + image.to(tl.int64) * uniforms_stride
    width = tl.load(image_sizes + image.to(tl.int64) * sizes_stride)
    height = tl.load(image_sizes + image.to(tl.int64) * sizes_stride + size_stride)
    seed = (bits24_of(tl.load(row)) << 24) | bits24_of(tl.load(row + uniform_stride))
    # Range of indices that contains all boxes of the image, usually with no box of another image in between.
    first_box = box_count
    last_box = -1
    for block_start in range(0, box_count, BOXES_PER_BLOCK):
        box = block_start + tl.arange(0, BOXES_PER_BLOCK)
        owner = tl.load(owners + box, mask=box < box_count, other=-1)
        first_box = tl.minimum(first_box, tl.min(tl.where(owner == image, box, box_count), 0))
        last_box = tl.maximum(last_box, tl.max(tl.where(owner == image, box, -1), 0))
    trial_count = _TRIAL_ROUNDS * TRIALS
    chosen = trial_count
    first_trial = 0
    while (chosen == trial_count) & (first_trial < trial_count):
        trial = first_trial + tl.arange(0, TRIALS_PER_BLOCK)
        in_bounds = trial < trial_count
        min_overlap = tl.load(row + (_SEED_LENGTH + trial // TRIALS) * uniform_stride, mask=in_bounds, other=0)
        left, top, window_width, window_height = trial_window(seed, trial, width, height, MIN_SCALE, SCALE_RANGE, TRIALS)
        ratio = tl.div_rn(window_width, window_height)
        has_valid_ratio = (ratio >= MIN_RATIO) & (ratio <= MAX_RATIO)
        is_accepted = min_overlap >= 1  # torchvision then accepts the whole image
        for index in range(first_box, last_box + 1):
            is_owned = tl.load(owners + index) == image
            x1, y1, x2, y2 = load_corners(boxes + index * 4, is_owned, width, height)
            overlap_width = tl.maximum(tl.minimum(x2, left + window_width) - tl.maximum(x1, left), 0.0)
            overlap_height = tl.maximum(tl.minimum(y2, top + window_height) - tl.maximum(y1, top), 0.0)
            intersection = overlap_width * overlap_height
            union = ((x2 - x1) * (y2 - y1) + window_width * window_height) - intersection
            overlaps = tl.div_rn(intersection, union) >= min_overlap
            is_accepted |= has_valid_ratio & overlaps & has_centre(left, top, window_width, window_height, x1, y1, x2, y2)
        chosen = tl.min(tl.where(is_accepted & in_bounds, trial, trial_count), 0)
        first_trial += TRIALS_PER_BLOCK
    is_whole = tl.load(row + (_SEED_LENGTH + chosen // TRIALS) * uniform_stride, mask=chosen < trial_count, other=1) >= 1
    left, top, window_width, window_height = trial_window(seed, chosen, width, height, MIN_SCALE, SCALE_RANGE, TRIALS)
    window_address = windows + image.to(tl.int64) * 4
    tl.store(window_address, tl.where(is_whole, 0.0, left))
    tl.store(window_address + 1, tl.where(is_whole, 0.0, top))
    tl.store(window_address + 2, tl.where(is_whole, width, window_width))
    tl.store(window_address + 3, tl.where(is_whole, height, window_height))
    for block_start in range(first_box, last_box + 1, BOXES_PER_BLOCK):
        box = block_start + tl.arange(0, BOXES_PER_BLOCK)
        is_owned = tl.load(owners + box, mask=box <= last_box, other=-1) == image
        x1, y1, x2, y2 = load_corners(boxes + box * 4, is_owned, width, height)
        is_inside = has_centre(left, top, window_width, window_height, x1, y1, x2, y2)
        tl.store(valid + box, tl.where(is_whole, 1, is_inside.to(tl.uint8)), mask=is_owned)


def box_windows(op: BoxCropOp, numbers: Tensor, sides: Tensor, boxes: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the windows as ``op.windows`` does, bit for bit, on the current stream. See there for the arguments.

    Cost:
        One launch.
    """
    assert isinstance(op, IoUCrop)
    windows = torch.empty(len(sides), 4, dtype=torch.float32, device=sides.device)
    valid = torch.empty(len(boxes), dtype=torch.bool, device=sides.device)
    constants = op.trial_count, op.min_scale, op.scale_range, op.min_ratio, op.max_ratio, TRIALS_PER_BLOCK, BOXES_PER_BLOCK
    # Products and sums are not fused: a product that is not rounded before the sum could give another window than torch.
    launch = launch_for(box_windows_kernel, (), constants, enable_fp_fusion=False)
    tensors = numbers, sides, boxes.contiguous(), owners, windows, valid.view(torch.uint8)
    with on_device(sides.device):
        launch(tensors, (len(sides), 1, 1), (len(boxes), *numbers.stride(), *sides.stride()))
    return windows, valid
