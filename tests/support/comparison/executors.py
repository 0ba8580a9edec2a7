"""The same rows through the torch executor and through the kernels."""

import torch
from support.comparison.replay import photographs
from support.comparison.values import difference
from support.ops.compositions import COMPOSITIONS, SMOOTH
from support.ops.pipelines import EXACT, JUMPS, RGB_EXACT, TIES

import gpuaug
from gpuaug.fusion.backends.torch_backend import gather_mask, run
from gpuaug.fusion.backends.triton import backend
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.pixels import LARGEST, converted
from gpuaug.fusion.table.rows import draws_of_plan_ops, fill_table

FLIPPED = 2e-3
"""Share of the values at the border of two bytes that a card may round to the other byte: it fuses products and sums."""


def through_both(modules, images, dtype, memory_format, frames=0):
    """Images and masks as torch makes them, and as the kernels do, pass by pass. ``frames``: number of frames of a clip."""
    # Each sample picks for itself, so that one launch holds several picks.
    augment = gpuaug.fuse(modules, pick="sample")
    program = augment._program(images.dtype if images.dtype in LARGEST else torch.uint8)
    size = size_of(images, frames)
    draws = program.draw(size, 1)
    masks = (photographs(images.shape[0], 2, *images.shape[2:], seed=5).long() // 16).to(torch.int16).to(images.device)
    segment = program.segments.at(0, size, masks=True)
    assert segment.stop == len(program.ops), f"left to Kornia: {segment.fallback}"
    plan = segment.plan
    table = torch.zeros(size.batch, plan.width)
    fill_table(plan, size, draws_of_plan_ops(segment.all_ops, draws._drawn), table.numpy())
    table = table.to(images.device)
    expected = run(plan, images, table)
    got = backend.run(plan, images, table, dtype, memory_format)
    expected_masks, got_masks = masks, masks
    for step in plan.passes:
        if step.gather_ops:
            expected_masks = gather_mask(step, expected_masks, table)
            got_masks = backend.run_mask(step, got_masks, table)
    return converted(expected, dtype), got, expected_masks, got_masks


def size_of(images, frames):
    """The size of images, or of clips of so many frames that lie behind one another."""
    return Size(len(images) // (frames or 1), *images.shape[1:], frames)


def disagreement(
    name, modules, images, dtype=torch.float32, memory_format=torch.contiguous_format, tolerance=2e-5, *, frames=0
):
    """What is wrong with the kernels' result, in words, or an empty string."""
    expected, got, expected_masks, got_masks = through_both(modules, images, dtype, memory_format, frames)
    if got.shape != expected.shape or not got.is_contiguous(memory_format=memory_format):
        return f"shape {tuple(got.shape)}, strides {got.stride()}"
    text = difference(got_masks, expected_masks, share=0.01)
    if text:
        return f"masks, {text}"
    if (name in EXACT or name in RGB_EXACT) and dtype == torch.float32:
        return difference(got, expected)
    of_floats = {torch.float32: tolerance, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
    step = of_floats.get(dtype) or max(1, round(tolerance * LARGEST[dtype]))
    share = 0.01 if name in TIES else FLIPPED if name in JUMPS else 0.0
    return difference(got, expected, atol=step, rtol=step if dtype.is_floating_point else 0, share=share, equal_nan=True)


def composition_difference(name, images):
    """How the kernels' images or masks differ from those of torch for a composition, or an empty string."""
    expected, got, expected_masks, got_masks = through_both(
        COMPOSITIONS[name](), images, torch.float32, torch.contiguous_format
    )
    # The interpreter does not fuse products and sums, so a byte's share of 255 may be one unit off.
    smooth = any(word in name for word in SMOOTH)
    share = FLIPPED if smooth and images.is_cuda else 0
    text = difference(got, expected, atol=2e-5 if smooth else 1e-7, share=share)
    if text:
        return f"{name}: {text}"
    # A turn takes either of two pixels half way between them.
    text = difference(got_masks, expected_masks, share=0.2 if "turn" in name else 0)
    return f"{name}, masks: {text}" if text else ""
