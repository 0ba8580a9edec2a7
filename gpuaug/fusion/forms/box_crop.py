"""Crops whose window depends on the boxes of the image. The device chooses the windows before the images are cropped.

A *plan* is a list of passes, that is, kernels that read and write all images. The *parameter table* holds one row of numbers
per sample, from which the passes read the parameters of the ops, such as crop windows. A *target dict* holds the annotations of
one image, such as ``{"boxes": …}``.
"""

from typing import Any

import torch
from torch import Tensor

from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.forms.kinds import Points
from gpuaug.fusion.ops.boxes import are_large, composed
from gpuaug.fusion.program.plan import BoxCrop, Plan


def crop_by_boxes(
    plan: Plan, crop: BoxCrop, table: Tensor, points: Points | None, input_sizes: Any, matrix_to_plan: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Choose the crop window of each image, and set ``points.valid_after_crop``, the mask of valid boxes.

    Args:
        plan: Plan that contains the crop.
        crop: The crop and its pass.
        table: Parameter table of the plan, (B, columns). Not modified.
        points: The boxes; ``None`` if there are none.
        input_sizes: (height, width) of the input images, or ``Ragged.places`` for images of different sizes.
        matrix_to_plan: Matrices that map pixels of the input images to pixels of the images at the start of the plan,
            (B, 3, 3); ``None`` for the identity.

    Returns:
        (parameter table with the windows, (B, columns); matrices that map pixels of the input images to output pixels of the
        plan, (B, 3, 3)).

    Cost:
        About twenty launches, in addition to the launches of ``dispatch.box_windows``.
    """
    # The resize that follows the crop reads a window of its source. It has three columns per axis, x then y: source pixels per
    # output pixel, and first pixel and number of pixels of the window. In the input ``table``, the window is the whole image.
    # The columns from ``plan.width`` on are: matrix before the crop, matrix after the crop, draws of the crop, and one number
    # per axis, which is -1 if a flip is between crop and resize.
    column = crop.pass_.first_column + crop.pass_.columns.warp
    scale = table[:, column : column + 4 : 3]
    sides = table[:, column + 2 : column + 6 : 3]
    matrix_before, matrix_after, draws, flip_signs = table[:, plan.width :].split((3 * 3, 3 * 3, crop.op.columns, 2), 1)
    matrix_before = composed(matrix_to_plan, matrix_before.view(-1, 3, 3))
    # owners: index of the image of each box
    no_boxes = table.new_empty(0, 4), table.new_empty(0, dtype=torch.int64)
    boxes, owners = no_boxes if points is None else points.corners(matrix_before, input_sizes)
    windows, is_valid = dispatch.box_windows(crop.op, draws, sides, boxes, owners)
    start, count = windows[:, :2], windows[:, 2:]
    minimum = crop.op.min_side_and_area
    if any(minimum):
        parts = torch.minimum(boxes[:, 2:], (start + count)[owners]) - torch.maximum(boxes[:, :2], start[owners])
        is_valid = is_valid & are_large(parts.clamp(min=0), *minimum)
    if points is not None:
        points.valid_after_crop = is_valid
    # The scale is computed by a single division, because nearest-neighbour interpolation depends on its last digit.
    out_sides = (sides / scale).round()
    flipped_start = torch.where(flip_signs < 0, sides - start - count, start)
    warp = torch.stack((count / out_sides, flipped_start, count), 2).flatten(1)
    factors = sides / count
    # Maps a pixel x of the image to (x + 0.5 - start) * factor - 0.5, because pixel centres lie half a pixel from the edges.
    crop_matrix = torch.nn.functional.pad(factors, (0, 1), value=1.0).diag_embed()
    crop_matrix[:, :2, 2] = (0.5 - start) * factors - 0.5
    new_table = torch.cat((table[:, :column], warp, table[:, column + 6 :]), 1)
    return new_table, composed(composed(matrix_before, crop_matrix), matrix_after.view(-1, 3, 3))
