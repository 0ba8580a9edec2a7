"""Crops whose window depends on the boxes of the image. The device chooses the windows before the images are cropped.

A *plan* is a list of *passes*: kernels that each read and write all images. The *parameter table* has one row of numbers per
sample, from which the passes read the parameters of the ops, such as crop windows. B is the number of samples, and n the number
of boxes of all images.
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
    """Choose the crop window of each image, and set ``points.valid_after_crop``, the mask of the boxes that the crops keep.

    Args:
        plan: Plan that contains the crop.
        crop: The crop, ``crop.op``, and the pass that runs it, ``crop.pass_``.
        table: Parameter table of the plan, (B, columns). Not modified.
        points: Boxes of all images, in pixels of the input images; ``None`` if there are none.
        input_sizes: (height, width) of the input images; or, if they differ in size, ``Ragged.places``, (B, 3 or 4): offset,
            height and width per image.
        matrix_to_plan: Matrices that map pixels of the input images to pixels of the images that the plan reads, (B, 3, 3);
            ``None`` for the identity.

    Returns:
        (parameter table with the windows, (B, columns); matrices that map pixels of the input images to pixels of the images
        that the plan writes, (B, 3, 3)).

    Cost:
        About twenty launches, in addition to the launches of ``dispatch.box_windows``.
    """
    # The crop is run by the resize after it, which reads a window of its source. The resize has three columns per axis, x then
    # y: number of source pixels per output pixel, first pixel of the window, number of pixels of the window. In the argument
    # ``table``, the window is the whole image. Columns from ``plan.width`` on: matrix of the ops before the crop, matrix of the
    # ops after the crop, random numbers of the crop, and for x and for y -1 if flips between crop and resize mirror it, else 1.
    column = crop.pass_.first_column + crop.pass_.columns.warp
    scale = table[:, column : column + 4 : 3]
    sides = table[:, column + 2 : column + 6 : 3]
    matrix_before, matrix_after, numbers, flip_signs = table[:, plan.width :].split((3 * 3, 3 * 3, crop.op.columns, 2), 1)
    matrix_before = composed(matrix_to_plan, matrix_before.view(-1, 3, 3))
    # ``owners``: index of the image of each box.
    no_boxes = table.new_empty(0, 4), table.new_empty(0, dtype=torch.int64)
    boxes, owners = no_boxes if points is None else points.corners(matrix_before, input_sizes)
    # ``windows``: (B, 4), first pixel in x and y, then width and height.
    windows, is_valid = dispatch.box_windows(crop.op, numbers, sides, boxes, owners)
    start, window_sides = windows[:, :2], windows[:, 2:]
    min_side_and_area = crop.op.min_side_and_area
    if any(min_side_and_area):
        visible_sides = torch.minimum(boxes[:, 2:], (start + window_sides)[owners]) - torch.maximum(boxes[:, :2], start[owners])
        is_valid = is_valid & are_large(visible_sides.clamp(min=0), *min_side_and_area)
    if points is not None:
        points.valid_after_crop = is_valid
    # The new scale is one division of integers, not a product with the old scale: nearest-neighbour interpolation depends on
    # the last digit.
    out_sides = (sides / scale).round()
    flipped_start = torch.where(flip_signs < 0, sides - start - window_sides, start)
    warp = torch.stack((window_sides / out_sides, flipped_start, window_sides), 2).flatten(1)
    # The matrix of crop and resize is composed of a matrix that stretches the window to the size of the image, and
    # ``matrix_after``, whose resize reads the whole image. A pixel x of the image becomes (x + 0.5 - start) * factor - 0.5,
    # because pixel centres lie half a pixel from the edges.
    factors = sides / window_sides
    crop_matrix = torch.nn.functional.pad(factors, (0, 1), value=1.0).diag_embed()
    crop_matrix[:, :2, 2] = (0.5 - start) * factors - 0.5
    new_table = torch.cat((table[:, :column], warp, table[:, column + 6 :]), 1)
    return new_table, composed(composed(matrix_before, crop_matrix), matrix_after.view(-1, 3, 3))
