"""Backend that runs a plan in torch, on any device: it is used on CPUs, and is the reference for the tests of the kernels.

A *plan* is the passes of a pipeline. A *pass* reads and writes all images once. It begins with its *front*: a gather, which
moves or interpolates pixels, or a filter, or a mix. It goes on with pointwise ops. The *parameter table* has one float32 row
per *sample*, an image or a clip, with the parameters of all ops. *Ragged* images differ in size. If images differ in size after
a pass, each lies in the top left corner of a *canvas*, a buffer of one size. An *index map* maps integer coordinates of pixels
to integer coordinates, as a flip, a crop or padding does. A *warp* is an interpolation by an affine or perspective matrix. The
*taps* of an output pixel are the source pixels that it is interpolated from.

In shapes, B is the number of samples, V of views (random augmentations per image), T of frames per clip, which is 1 for images,
and K of columns of the table. An apostrophe marks the size of output images.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gpuaug.core.ragged import MAX_WARPED_SIDE, Ragged
from gpuaug.fusion.backends.antialias import resize_antialiased
from gpuaug.fusion.backends.readers import (
    DenseReader,
    MaskLayout,
    RaggedReader,
    Reader,
    as_bits,
    dtype_of,
    image_of,
    mask_fills,
    reader,
    repeat_per_view,
)
from gpuaug.fusion.ops.base import FrontOp, RowOp
from gpuaug.fusion.ops.mix import MixOp
from gpuaug.fusion.ops.positional import Erasing
from gpuaug.fusion.pixels import LARGEST, converted, divided_by_largest, fixed_point, round_half_up, to_bytes, unit_range
from gpuaug.fusion.program.gather import IndexMaps
from gpuaug.fusion.program.intermediates import bytes_between
from gpuaug.fusion.program.plan import Canvas, Canvases, ChainsPass, GatherPass, Pass, Plan

MOST_VALUES = 2**24
"""Maximum number of pixel values that an op without a kernel processes at once, which limits its memory to about 2 GB."""


def run(plan: Plan, images: Tensor | Ragged, table: Tensor, canvases: Canvases = ()) -> Tensor:
    """Run all passes.

    Args:
        plan: Plan for the size of the images.
        images: Images of a dtype in ``IMAGE_DTYPES`` (``fusion/pixels.py``).
        table: Parameter table, on the device of the images.
        canvases: (height, width) of the canvas of each pass but the last, from ``Plan.canvases``; empty if all images between
            passes have one size.

    Shape:
        - images: (B · T, C, H, W), or a ragged batch
        - table: (V · B, ``plan.width``), float32

    Returns:
        (V · B · T, C, H', W') float32.

    Cost:
        Some tens of launches per pass on a GPU, and several copies of the images.
    """
    first_pass, *other_passes = plan.passes
    tables = {frames: rows_of_frames(plan, table, frames) for frames in {pass_.out.images_per_sample for pass_ in plan.passes}}
    dtype = dtype_of(images)
    if dtype in LARGEST and dtype != torch.uint8:  # torch supports few functions of uint16
        images = replace(images, data=unit_range(images.data)) if isinstance(images, Ragged) else unit_range(images)
    converts_to_bytes = bytes_between(plan.passes, dtype)
    # ``canvases[:1]``: the canvas of the first pass, if there is one. The last pass has none.
    result = run_pass(first_pass, images, tables[first_pass.out.images_per_sample], *canvases[:1])
    for index, pass_ in enumerate(other_passes, 1):
        table = tables[pass_.out.images_per_sample]
        # ``source``: images that the pass reads. Entry ``index - 1`` is for the images that the pass before has written.
        source = converted(result, torch.uint8) if converts_to_bytes[index - 1] else result
        images_to_run = _images_to_run(pass_, table)
        if images_to_run is None:
            result = run_pass(pass_, source, table, *canvases[index : index + 1])
        elif len(images_to_run):
            result = result.index_copy(0, images_to_run, run_pass(pass_, source[images_to_run], table[images_to_run]))
    return result


def rows_of_frames(plan: Plan, table: Tensor, frames: int) -> Tensor:
    """Return a table with one row per image, (V · B · T, K), from a table with one row per clip of ``frames`` frames."""
    if frames == 1:
        return table
    frame_index = torch.arange(frames, device=table.device).repeat(len(table))
    table = table.repeat_interleave(frames, 0)
    for pass_ in plan.passes:
        pass_table = pass_.columns_of(table)
        if isinstance(pass_.front, RowOp):
            pass_.front.rows_to_frames(pass_table, frame_index, frames)
        for op, column in pass_.point_columns:
            op.rows_to_frames(pass_table[:, column:], frame_index, frames)
    return table


def _images_to_run(pass_: Pass, table: Tensor) -> Tensor | None:
    """Return the indices of the images to which at least one op of a pass applies. ``table``: one row per image.

    ``None`` to run the pass on all images: if images cannot skip the pass, so that it has no column of *buffer routes* (0 for
    an image that skips it); if none of these images skips it; and on a GPU, where the host would wait for the indices.
    """
    if pass_.route_column < 0 or table.is_cuda:
        return None
    applies = pass_.columns_of(table)[:, pass_.route_column] != 0
    return None if bool(applies.all()) else applies.nonzero()[:, 0]


def run_pass(pass_: Pass, images: Tensor | Ragged, table: Tensor, canvas: Canvas | None = None) -> Tensor:
    """Run one pass: its front, then its pointwise ops.

    ``table``: whole table, one row per output image. ``canvas``: (height, width) of the result, if images differ in size after
    the pass.
    """
    if pass_.out.ragged:
        assert isinstance(pass_, GatherPass)
        assert canvas is not None
        return _run_on_canvas(pass_, images, table, canvas)
    pass_table = pass_.columns_of(table)
    if isinstance(pass_, GatherPass):
        values = gather(pass_, images, pass_table)
    else:
        assert isinstance(images, Tensor), "ragged batches begin with a gather"
        if isinstance(pass_, ChainsPass):  # has no pointwise ops
            return unit_range(run_chains(pass_, repeat_per_view(images, len(table)), pass_table, run))
        values = apply_to_samples(pass_.front, repeat_per_view(unit_range(images), len(table)), pass_table)
    for op, column in pass_.point_columns:
        values = apply_to_samples(op, values, pass_table[:, column:])
    return values


def _run_on_canvas(pass_: GatherPass, images: Tensor | Ragged, table: Tensor, canvas: Canvas) -> Tensor:
    """Run a pass after which images differ in size, image by image. The rest of each canvas is 0."""
    result = torch.zeros((len(table), pass_.out.channels, *canvas), dtype=torch.float32, device=images.device)
    for index, row in enumerate(table):
        height, width = (int(side) for side in pass_.columns_of(row[None])[0, pass_.columns.out_size :][:2])
        image_pass = replace(pass_, out=pass_.out.to(height, width))
        result[index, :, :height, :width] = run_pass(image_pass, image_of(images, index % len(images)), row[None])[0]
    return result


def run_chains(pass_: ChainsPass, images: Tensor, table: Tensor, run_plan: Callable[[Plan, Tensor, Tensor], Tensor]) -> Tensor:
    """Run a pass that mixes the results of *chains*: sequences of ops that each process a copy of the images.

    Args:
        pass_: The pass.
        images: Images of all views, of a dtype in ``IMAGE_DTYPES``.
        table: Parameter table from the first column of the pass on, one row per image.
        run_plan: Function of (plan, uint8 images, table) that runs a plan, as ``run`` does.

    Shape:
        - images: (B, C, H, W)
        - table: (B, K) float32
        - returns: (B, C, H, W) uint8
    """
    images = converted(images, torch.uint8)
    results = converted(run_plan(pass_.chain_plan, images, torch.cat(pass_.chain_tables(table))), torch.uint8)
    return pass_.front.apply(torch.cat((images[None], results.unflatten(0, (-1, len(images))))), table)


def apply_to_samples(op: RowOp, images: Tensor, op_table: Tensor, *, as_on_gpu: bool = False) -> Tensor:
    """Apply ``op`` to the images whose apply mask, the first column of ``op_table``, is not 0. Return all images.

    ``op_table``: columns of the op, perhaps followed by others. ``as_on_gpu``: whether images on a CPU, for Triton's
    interpreter, are computed as on a GPU.
    """
    apply = op.apply_on_cpu if images.device.type == "cpu" and not as_on_gpu else op.apply
    if isinstance(op, FrontOp) and op.kernel == "torch":
        piece_length = max(MOST_VALUES // images[0].numel(), 1)
        row_pieces = op_table.split(piece_length)
        # A mix, such as a mosaic, reads all images of the batch.
        image_pieces = [images] * len(row_pieces) if isinstance(op, MixOp) else images.split(piece_length)
        applied = torch.cat([apply(*piece) for piece in zip(image_pieces, row_pieces, strict=True)])
    else:
        applied = apply(images, op_table)
    applied = to_bytes(applied, op.to_bytes)
    return torch.where(op_table[:, 0, None, None, None] != 0, applied, images) if op.is_random else applied


def gather(pass_: GatherPass, images: Tensor | Ragged, table: Tensor) -> Tensor:
    """Run the front of a gather pass: move and interpolate pixels. Return float32. ``table``: from the pass's first column."""
    front, columns, out = pass_.front, pass_.columns, pass_.out
    if columns.frames >= 0:
        assert isinstance(images, Tensor)  # ragged batches have no clips
        images = images[_selected_frames(pass_, table) % len(images)]  # % because all views read the same images
    parameters = _Parameters(table, pass_)
    x = torch.arange(out.width, device=images.device)[None, None, :]
    y = torch.arange(out.height, device=images.device)[None, :, None]
    fill_column = columns.after_fill  # fill of the pixels that are not ``inside``: constant padding
    # From coordinates of output pixels to coordinates of source pixels: ``after``, the interpolation, ``before``.
    x, y, inside = parameters.map_indices(front.after, columns.after, x, y)
    if front.filter:
        values = _resize_antialiased(pass_, images, table, x, y)
    elif front.warp is None:
        # A gather without an interpolation has no index maps ``after``, so that ``inside`` is None here. The fill of padding is
        # inserted below, after bytes are divided by 255, because fill · 255 / 255 may differ from the fill. Until then a pixel
        # of padding is a copy of the pixel (0, 0).
        fill_column = columns.before_fill
        x, y, inside = parameters.map_indices(front.before, columns.before, x, y)
        source = reader(images, len(table), out.channels)
        values = source(x, y) if inside is None else source(x * inside, y * inside)
    else:
        taps = _Taps(reader(images, len(table), out.channels), parameters)
        values = taps.interpolate(columns.warp, x, y, nearest=front.nearest, half_pixel_centers=front.half_pixel_centers)
    values = divided_by_largest(values.float(), torch.uint8) if dtype_of(images) == torch.uint8 else values.float()
    if front.blends_fill:
        weight = parameters.weight_inside(x, y)
        fill = parameters.channels(columns.warp_fill, out.channels)
        # A sample that skips the warp has weight 1 everywhere, and must not change.
        values = torch.where(weight == 1, values, weight * (values - fill) + fill)
    values = to_bytes(values, front.to_bytes)
    if inside is not None:
        values = torch.where(inside[:, None], values, parameters.channels(fill_column, out.channels))
    return values


def _selected_frames(pass_: GatherPass, table: Tensor) -> Tensor:
    """Return the index of the source image per output frame, (V · B · T',), view by view."""
    output_frame = torch.arange(len(table), device=table.device)
    columns = table[:, pass_.columns.frames : pass_.columns.frames + pass_.out.frames]
    selected = columns.gather(1, (output_frame % pass_.out.frames)[:, None])[:, 0].long()
    return output_frame // pass_.out.frames * pass_.source.frames + selected


def gather_mask(
    pass_: GatherPass, masks: Tensor, table: Tensor, mask_layout: MaskLayout | None = None, canvas: Canvas | None = None
) -> Tensor:
    """Run the front of a gather pass on masks of any dtype, with the nearest pixel. Arguments: ``run_mask`` of ``dispatch.py``.

    Shape:
        - masks: (B · T, C, H, W), or flat with ``mask_layout`` of N masks
        - returns: (B · T, C, H', W'); with ``mask_layout`` (N, 1, H', W')
    """
    front, columns = pass_.front, pass_.columns
    dtype = masks.dtype
    masks = as_bits(masks)
    table = _rows_of_masks(pass_.columns_of(table), masks, mask_layout)
    parameters = _Parameters(table, pass_)
    height, width = canvas or (pass_.out.height, pass_.out.width)
    x = torch.arange(width, device=masks.device)[None, None, :]
    y = torch.arange(height, device=masks.device)[None, :, None]
    if canvas is not None:  # pixels of the canvas beyond the mask repeat its last column and its last row
        x = torch.minimum(x, parameters.integer(columns.out_size + 1) - 1)
        y = torch.minimum(y, parameters.integer(columns.out_size) - 1)
    x, y, inside = parameters.map_indices(front.after, columns.after, x, y)
    source = DenseReader(masks, len(table)) if mask_layout is None else RaggedReader(masks, mask_layout.layouts)
    padding_fill, warp_fill, after_fill = mask_fills(front, dtype)
    taps = _Taps(source, parameters, padding_fill, warp_fill)
    if front.warp is None:
        values = taps.read(x, y)
    else:
        values = taps.interpolate(columns.mask_warp, x, y, nearest=True, half_pixel_centers=front.mask_half_pixel_centers)
    return (values if inside is None else values.masked_fill(~inside[:, None], after_fill)).view(dtype)


def erase_masks(pass_: Pass, masks: Tensor, table: Tensor, mask_layout: MaskLayout | None = None) -> Tensor:
    """Return masks, with zeros where the pass erases the pixels of images, as in Kornia. Shapes: see ``gather_mask``."""
    for op, column in pass_.point_columns:
        if isinstance(op, Erasing) and op.erases_masks:
            op_table = _rows_of_masks(pass_.columns_of(table), masks, mask_layout)[:, column:]
            covered = op.erased_pixels(masks, op_table) & (op_table[:, 0, None, None, None] != 0)
            masks = as_bits(masks).masked_fill(covered, 0).view(masks.dtype)
    return masks


def _rows_of_masks(table: Tensor, masks: Tensor, mask_layout: MaskLayout | None) -> Tensor:
    """Return the row of each mask: the row of its image or clip, or, with ``mask_layout``, of its owner."""
    if mask_layout is not None:
        return table.index_select(0, mask_layout.owners)
    return table if len(table) == len(masks) else table.repeat_interleave(len(masks) // len(table), 0)


class _Parameters:
    """Parameter table of a gather pass. The methods read its columns as tensors that broadcast with coordinates or images.

    Coordinates x and y are tensors that broadcast to (B, h, w), for output pixels of h rows and w columns.
    """

    def __init__(self, table: Tensor, pass_: GatherPass) -> None:
        self._table = table
        self.device = table.device
        self.front = pass_.front
        self.columns = pass_.columns

    def number(self, column: int) -> Tensor:
        """Return a column, (B, 1, 1) float32."""
        return self._table[:, column, None, None]

    def integer(self, column: int) -> Tensor:
        """Return a column of integers, (B, 1, 1) int64."""
        return self.number(column).long()

    def channels(self, column: int, channels: int) -> Tensor:
        """Return one column per channel, (B, C, 1, 1) float32; zeros if ``column`` is -1."""
        if column < 0:
            return self._table.new_zeros(1, 1, 1, 1)
        return self._table[:, column : column + channels, None, None]

    def map_indices(self, maps: IndexMaps, column: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Map pixel indices of the output of ``maps`` to its input.

        ``column``: first column of the maps: sign and offset of x, then of y; with padding also the bounds of the image,
        [low, high), in x, then in y.

        Returns:
            (x, y, mask of the pixels that are not padding). The mask is ``None`` unless there is constant padding.
        """
        if not maps.ops:
            return x, y, None
        x = self.integer(column) * x + self.integer(column + 1)
        y = self.integer(column + 2) * y + self.integer(column + 3)
        if not maps.edge:
            return x, y, None
        low_x, high_x, low_y, high_y = (self.integer(column + k) for k in range(4, 8))
        if maps.edge == "constant":
            return x, y, (x >= low_x) & (x < high_x) & (y >= low_y) & (y < high_y)
        return _pad_index(maps.edge, x, low_x, high_x), _pad_index(maps.edge, y, low_y, high_y), None

    def warp_sizes(self, column: int) -> tuple[Tensor, Tensor]:
        """Return width and height of the input images of a warp, (B, 1, 1) int64. ``column``: first column of its matrix."""
        size_column = column + (6 if self.front.interpolation == "affine" else 9)
        return self.integer(size_column), self.integer(size_column + 1)

    def warp_coordinates(self, column: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input coordinates (x, y), float32, of output pixels of a warp. ``column``: first column of its matrix."""
        matrix = [self.number(column + k) for k in range(6 if self.front.interpolation == "affine" else 9)]
        source_x = matrix[0] * x + (matrix[1] * y + matrix[2])
        source_y = matrix[3] * x + (matrix[4] * y + matrix[5])
        if self.front.interpolation == "perspective":
            depth = matrix[6] * x + (matrix[7] * y + matrix[8])
            source_x, source_y = source_x / depth, source_y / depth
        # Clamped, because a larger float cannot be converted to an integer. Pixels at the limit are outside of every image.
        limit = float(MAX_WARPED_SIDE)
        source_x, source_y = (torch.nan_to_num(source, nan=-limit).clamp(-limit, limit) for source in (source_x, source_y))
        return source_x, source_y

    def weight_inside(self, x: Tensor, y: Tensor) -> Tensor:
        """Return, per output pixel of a warp, the weight of its source pixels that lie inside the image, (B, 1, h, w)."""
        nearest = self.front.nearest
        column = self.columns.warp
        weights = []
        for coordinate, count in zip(self.warp_coordinates(column, x, y), self.warp_sizes(column), strict=True):
            # The two taps along the axis are ``first`` and ``first + 1``; the nearest pixel is ``first``, with weight 1.
            first = torch.round(coordinate) if nearest else torch.floor(coordinate)
            second_weight = torch.zeros_like(coordinate) if nearest else coordinate - first
            weights.append(
                (1 - second_weight) * ((first >= 0) & (first < count)) + second_weight * ((first >= -1) & (first < count - 1))
            )
        return (weights[0] * weights[1])[:, None]


def _pad_index(edge: str, index: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return the index in [low, high) of the pixel that padding at ``index`` copies, by reflection, or the nearest pixel."""
    if edge == "reflect":
        index = low + (index - low).abs()
        index = high - 1 - (high - 1 - index).abs()
    return torch.minimum(torch.maximum(index, low), high - 1)


class _Taps:
    """Reader of the pixels that are interpolated: pixels of the images after the index maps ``Gather.before``.

    Args:
        source: Reader of the images or masks.
        parameters: Parameters of the pass.
        fill: Fill of constant padding, for masks. ``None`` for images, whose fill is in ``parameters``.
        outside: Value that a warp reads outside the image.
    """

    def __init__(self, source: Reader, parameters: _Parameters, fill: int | None = None, outside: int = 0) -> None:
        self._outside = outside
        self._reader = source
        self._parameters = parameters
        # The fill of masks has the dtype of the masks. The fill of images is float32, because it may lie between two values of
        # the dtype of the images, and is rounded with the result.
        if fill is not None:
            self._fill = torch.full((), fill, dtype=source.dtype, device=parameters.device)
        else:
            unit = 255 if source.dtype == torch.uint8 else 1
            self._fill = parameters.channels(parameters.columns.before_fill, source.channels) * unit

    def read(self, x: Tensor, y: Tensor, inside: Tensor | None = None) -> Tensor:
        """Return the pixels at integer coordinates, (B, C, h, w), with the fill in constant padding.

        ``inside``: mask of the coordinates inside the image that a warp reads. Where it is False, the value is ``outside``.
        ``None`` if all are inside.
        """
        x, y, not_padding = self._parameters.map_indices(self._parameters.front.before, self._parameters.columns.before, x, y)
        if inside is not None:
            x, y = x * inside, y * inside
        if not_padding is not None:
            x, y = x * not_padding, y * not_padding
        values = self._reader(x, y)
        if not_padding is not None:
            values = torch.where(not_padding[:, None], values, self._fill)
        if inside is not None:
            # Not a product, because the pixel that was read in place of a pixel outside may be NaN.
            values = values.masked_fill(~inside[:, None], self._outside)
        return values

    def interpolate(self, column: int, x: Tensor, y: Tensor, *, nearest: bool, half_pixel_centers: bool) -> Tensor:
        """Return the output pixels of a resize or warp at coordinates (x, y).

        ``column``: its first column. Columns of a resize: scale, start and count of x, then of y.
        """
        parameters = self._parameters
        front = parameters.front
        if front.interpolation == "resample":
            centre = 0.5 if half_pixel_centers else 0.0
            source_x = (x.float() + centre) * parameters.number(column) - (0.0 if nearest else centre)
            source_y = (y.float() + centre) * parameters.number(column + 3) - (0.0 if nearest else centre)
            start_x, count_x = parameters.integer(column + 1), parameters.integer(column + 2)
            start_y, count_y = parameters.integer(column + 4), parameters.integer(column + 5)
        else:
            source_x, source_y = parameters.warp_coordinates(column, x, y)
            start_x = start_y = torch.zeros_like(parameters.integer(column))
            count_x, count_y = parameters.warp_sizes(column)

        def read(x: Tensor, y: Tensor) -> Tensor:
            """Return the pixels at integer coordinates relative to pixel ``start`` of a window of ``count`` pixels per axis.

            Outside the window, return ``outside`` if ``front.zero_outside``, else the nearest pixel of the window. The window
            is the part of the image that is resized, or, for a warp, the whole image.
            """
            if front.zero_outside:
                return self.read(start_x + x, start_y + y, (x >= 0) & (x < count_x) & (y >= 0) & (y < count_y))
            x, y = torch.minimum(x.clamp(min=0), count_x - 1), torch.minimum(y.clamp(min=0), count_y - 1)
            return self.read(start_x + x, start_y + y)

        if nearest:
            # A warp rounds half to even, as ``grid_sample`` does. A resize reads the pixel whose area contains the coordinate.
            rounded = torch.floor if front.interpolation == "resample" else torch.round
            return read(rounded(source_x).long(), rounded(source_y).long())
        left, top = torch.floor(source_x), torch.floor(source_y)
        weight_x, weight_y = (source_x - left)[:, None], (source_y - top)[:, None]
        rounds_axes = front.rounds_axes and self._reader.dtype == torch.uint8
        if rounds_axes:
            weight_x = fixed_point(weight_x, parameters.number(column)[:, None])
            weight_y = fixed_point(weight_y, parameters.number(column + 3)[:, None])
        left, top = left.long(), top.long()
        upper = _lerp(read(left, top), read(left + 1, top), weight_x)
        lower = _lerp(read(left, top + 1), read(left + 1, top + 1), weight_x)
        if rounds_axes:
            return round_half_up(_lerp(round_half_up(upper), round_half_up(lower), weight_y))
        return _lerp(upper, lower, weight_y)


def _lerp(first: Tensor, second: Tensor, weight: Tensor) -> Tensor:
    """Return the linear interpolation between two pixels. ``weight``: weight of the second."""
    mean = first * (1 - weight) + second * weight
    if first.dtype == torch.uint8:  # has no NaN
        return mean
    # With weight 0, the result must be the first pixel, bit for bit, but 0 · NaN is NaN.
    return torch.where(weight == 0, first, mean)


def _resize_antialiased(pass_: GatherPass, images: Tensor | Ragged, table: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return images resized with antialiasing at output coordinates (x, y), one by one. On a GPU, the host waits for ``table``.

    Values are in the unit of ``images``: [0, 255] for uint8. ``table``: from the first column of the pass.
    """
    front = pass_.front
    first = pass_.columns.warp
    are_bytes = dtype_of(images) == torch.uint8
    rounds_axes = front.rounds_axes and are_bytes
    resized = []
    for index, row in enumerate(table[:, first : first + 6].tolist()):
        image_reader = reader(image_of(images, index % len(images)), 1, pass_.out.channels)
        taps = _Taps(image_reader, _Parameters(table[index : index + 1], pass_))
        # x is (1, 1, W') or (B, 1, W'), and y is (1, H', 1) or (B, H', 1).
        image_x = x[index % len(x), 0]
        image_y = y[index % len(y), :, 0]

        def read(lines: Tensor, columns: Tensor, taps: _Taps = taps) -> Tensor:
            return taps.read(columns.long()[None, None, :], lines.long()[None, :, None])[0].float()

        resized.append(resize_antialiased(read, tuple(row), image_x, image_y, front.filter, rounds_axes=rounds_axes))
    values = torch.stack(resized)
    return values.clamp(0, 255 if are_bytes else 1) if front.clamps else values
