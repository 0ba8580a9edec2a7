"""The plan in torch, on any device: the reference that the kernels are compared with, and what runs on a CPU."""

from dataclasses import replace

import torch
from torch import Tensor

from gpuaug.core.ragged import MOST_WARPED, Ragged
from gpuaug.fusion.backends.antialias import antialiased
from gpuaug.fusion.backends.readers import MaskPlaces, Places, Planes, Reader, dtype_of, image_of, reader, viewed
from gpuaug.fusion.ops.base import RowOp
from gpuaug.fusion.ops.positional import Erasing
from gpuaug.fusion.pixels import LARGEST, share_of, unit_range
from gpuaug.fusion.program.gather import Columns, Gather, Part
from gpuaug.fusion.program.plan import Canvases, GatherPass, Pass, Plan


def run(plan: Plan, images: Tensor | Ragged, table: Tensor, canvases: Canvases = ()) -> Tensor:
    """Run all passes.

    Args:
        plan: For images of this size.
        images: Of a type in ``PIXELS``.
        table: The samples' numbers, on the device of the images.
        canvases: ``Plan.canvases``.

    Shape:
        - images: (B · T, C, H, W), or a ragged batch of B; T frames of a clip, or 1
        - table: (V · B, ``plan.width``), float32, for V views

    Returns:
        (V · B · T, C, H', W') float32.

    Cost:
        Some tens of launches a pass on a GPU, and several copies of the images.
    """
    first, *others = plan.passes
    tables = {frames: _of_frames(plan, table, frames) for frames in {step.out.each for step in plan.passes}}
    made = run_pass(first, _readable(images), tables[first.out.each], *canvases[:1])
    for index, step in enumerate(others, 1):
        table = tables[step.out.each]
        if step.out.ragged:
            made = run_pass(step, made, table, canvases[index])
            continue
        samples = _samples_of(step, table)
        if samples is None:
            made = run_pass(step, made, table)
        elif len(samples):
            made = made.index_copy(0, samples, run_pass(step, made[samples], table[samples]))
    return made


def _of_frames(plan: Plan, table: Tensor, frames: int) -> Tensor:
    """The row of every image, (V · B · T, K), given the rows of clips of so many frames."""
    if frames == 1:
        return table
    frame = torch.arange(frames, device=table.device).repeat(len(table))
    table = table.repeat_interleave(frames, 0)
    for step in plan.passes:
        rows = step.rows_of(table)
        if isinstance(step.front, RowOp):
            step.front.spread(rows, frame, frames)
        for op, (_, column, _) in zip(step.points, step.program, strict=True):
            op.spread(rows[:, column:], frame, frames)
    return table


def _readable(images: Tensor | Ragged) -> Tensor | Ragged:
    """The images; those of 16 bits as floats in image units, since torch has few functions for uint16."""
    dtype = dtype_of(images)
    if dtype not in LARGEST or dtype == torch.uint8:
        return images
    return replace(images, data=unit_range(images.data)) if isinstance(images, Ragged) else unit_range(images)


def _samples_of(step: Pass, table: Tensor) -> Tensor | None:
    """Indices of the samples that any op of a pass applies to; ``None`` for all.

    On a GPU the host would have to wait for the answer.
    """
    if step.way < 0 or table.is_cuda:
        return None
    applies = step.rows_of(table)[:, step.way] != 0
    return None if bool(applies.all()) else applies.nonzero()[:, 0]


def run_pass(step: Pass, images: Tensor | Ragged, table: Tensor, canvas: tuple[int, int] | None = None) -> Tensor:
    """One pass: its front, then its pointwise ops.

    ``canvas``: height and width of the result, at least those of the images behind the pass.
    """
    if step.out.ragged:
        assert isinstance(step, GatherPass)
        assert canvas is not None
        return _on_canvas(step, images, table, canvas)
    rows = step.rows_of(table)
    if isinstance(step, GatherPass):
        values = gather(step, images, rows)
    else:
        assert isinstance(images, Tensor), "ragged batches begin with a gather"
        values = masked(step.front, viewed(unit_range(images), len(table)), rows)
    for op, (_, column, _) in zip(step.points, step.program, strict=True):
        values = masked(op, values, rows[:, column:])
    return values


def _on_canvas(step: GatherPass, images: Tensor | Ragged, table: Tensor, canvas: tuple[int, int]) -> Tensor:
    """A pass behind which images differ in size: every sample by itself, at the top left of a canvas of zeros."""
    made = torch.zeros((len(table), step.out.channels, *canvas), dtype=torch.float32, device=images.device)
    for sample, row in enumerate(table):
        height, width = (int(side) for side in step.rows_of(row[None])[0, step.columns.sides :][:2])
        alone = replace(step, out=step.out.to(height, width))
        made[sample, :, :height, :width] = run_pass(alone, image_of(images, sample % len(images)), row[None])[0]
    return made


def masked(op: RowOp, images: Tensor, rows: Tensor) -> Tensor:
    """``op`` on the samples that it applies to."""
    applied = op.apply(images, rows)
    return torch.where(rows[:, 0, None, None, None] != 0, applied, images) if op.is_random else applied


def gather(step: GatherPass, images: Tensor | Ragged, table: Tensor) -> Tensor:
    """Move pixels and interpolate, in float32."""
    front, columns, out = step.front, step.columns, step.out
    if columns.frames >= 0:
        assert isinstance(images, Tensor)
        images = images[_chosen(step, table) % len(images)]
    place = _Place(table)
    x = torch.arange(out.width, device=images.device)[None, None, :]
    y = torch.arange(out.height, device=images.device)[None, :, None]
    inside: Tensor | None = None
    fill_column = columns.after_fill
    if front.after.ops:
        x, y, inside = _mapped(front.after, place, columns.after, x, y)
    if front.filter:
        values = _antialiased(front, columns, images, table, x, y)
    elif front.warp is None:
        # Filled once pixels are floats: a fill times 255, over 255, may be another number.
        fill_column = columns.before_fill
        if front.before.ops:
            x, y, inside = _mapped(front.before, place, columns.before, x, y)
        values = reader(images, len(table))(x, y) if inside is None else reader(images, len(table))(x * inside, y * inside)
    else:
        taps = _Taps(reader(images, len(table)), front, columns, place)
        values = _interpolated(
            front, place, columns.warp, taps, x, y, nearest=front.nearest, half_pixel_centers=front.half_pixel_centers
        )
    values = share_of(values.float(), torch.uint8) if dtype_of(images) == torch.uint8 else values.float()
    if front.fills:
        share = _share_inside(front, place, columns.warp, x, y)
        fill = place.channels(columns.warp_fill, out.channels)
        # A sample that is skipped lies inside, and keeps every bit.
        values = torch.where(share == 1, values, share * (values - fill) + fill)
    if inside is not None:
        values = torch.where(inside[:, None], values, place.channels(fill_column, out.channels))
    return values


def _chosen(step: GatherPass, table: Tensor) -> Tensor:
    """Index of the source image of every frame that is made, counted on through all views."""
    frame = torch.arange(len(table), device=table.device)
    columns = table[:, step.columns.frames : step.columns.frames + step.out.frames]
    chosen = columns.gather(1, (frame % step.out.frames)[:, None])[:, 0].long()
    return frame // step.out.frames * step.source.frames + chosen


def gather_mask(
    step: GatherPass,
    masks: Tensor,
    table: Tensor,
    places: MaskPlaces | None = None,
    canvas: tuple[int, int] | None = None,
) -> Tensor:
    """Move the pixels of masks of any dtype, to the nearest. ``canvas``: as of ``dispatch.run_mask``.

    Shape:
        - masks: (B · T, C, H, W), or flat where there are ``places`` of N of them
        - returns: (B · T, C, H', W'); with places (N, 1, H', W')
    """
    front, columns = step.front, step.columns
    dtype = masks.dtype
    masks = as_bits(masks)
    table = _rows(step.rows_of(table), masks, places)
    place = _Place(table)
    height, width = canvas or (step.out.height, step.out.width)
    x = torch.arange(width, device=masks.device)[None, None, :]
    y = torch.arange(height, device=masks.device)[None, :, None]
    if canvas is not None:
        x, y = torch.minimum(x, place.whole(columns.sides + 1) - 1), torch.minimum(y, place.whole(columns.sides) - 1)
    inside: Tensor | None = None
    if front.after.ops:
        x, y, inside = _mapped(front.after, place, columns.after, x, y)
    source = Planes(masks, len(table)) if places is None else Places(masks, places.apart())
    taps = _Taps(source, front, columns, place, fill=mask_fill(front.before, dtype))
    if front.warp is None:
        values = taps.read(x, y, None)
    else:
        squares = front.mask_half_pixel_centers
        values = _interpolated(front, place, columns.mask_warp, taps, x, y, nearest=True, half_pixel_centers=squares)
    if inside is not None:
        fill = torch.full((), mask_fill(front.after, dtype), dtype=values.dtype, device=values.device)
        values = torch.where(inside[:, None], values, fill)
    return values.view(dtype)


def erased(step: Pass, masks: Tensor, table: Tensor, places: MaskPlaces | None = None) -> Tensor:
    """Masks, (B · T, C, H, W), with zeros where the pass erases their images, as in Kornia."""
    for op, (_, column, _) in zip(step.points, step.program, strict=True):
        if isinstance(op, Erasing) and op.erases_masks:
            rows = _rows(step.rows_of(table), masks, places)[:, column:]
            covered = op.covers(masks, rows) & (rows[:, 0, None, None, None] != 0)
            masks = as_bits(masks).masked_fill(covered, 0).view(masks.dtype)
    return masks


def _rows(table: Tensor, masks: Tensor, places: MaskPlaces | None) -> Tensor:
    """The row of each mask: that of its place in the batch, of the clip that it is a frame of, or of its owner."""
    if places is not None:
        return table.index_select(0, places.owners)
    return table if len(table) == len(masks) else table.repeat_interleave(len(masks) // len(table), 0)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(masks: Tensor) -> Tensor:
    """The bits of masks, as a type that torch moves and fills, which it does not do with uint16 or float8."""
    return masks.view(_BITS.get(masks.dtype.itemsize, masks.dtype))


def mask_fill(part: Part, dtype: torch.dtype) -> int:
    """The bits of what padding holds in masks of a type."""
    return int(as_bits(torch.full((), part.mask_fill, dtype=torch.float32, device="cpu").to(dtype)).item())


class _Place:
    """Columns of the table as tensors that broadcast over images."""

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self.device = table.device

    def number(self, column: int) -> Tensor:
        """(B, 1, 1) float32."""
        return self._table[:, column, None, None]

    def whole(self, column: int) -> Tensor:
        """(B, 1, 1) int64."""
        return self.number(column).long()

    def channels(self, column: int, channels: int) -> Tensor:
        """(B, C, 1, 1) float32; zeros where there is no column."""
        if column < 0:
            return self._table.new_zeros(1, 1, 1, 1)
        return self._table[:, column : column + channels, None, None]


class _Taps:
    """Reads of the source through the permutations before the interpolation."""

    def __init__(self, source: Reader, front: Gather, columns: Columns, place: _Place, fill: int | None = None) -> None:
        self._reader = source
        self._part, self._column, self._place = front.before, columns.before, place
        # Masks keep their type. A fill for images is float32, and is rounded with the result: it may lie between two bytes, or
        # between two numbers of 16 bits.
        if fill is not None:
            self._fill = torch.full((), fill, dtype=source.dtype, device=place.device)
        else:
            self._fill = place.channels(columns.before_fill, source.channels) * (255 if source.dtype == torch.uint8 else 1)

    def read(self, x: Tensor, y: Tensor, inside: Tensor | None) -> Tensor:
        """The source at whole pixels; 0 where not ``inside``. Floats, unless nothing is filled."""
        within: Tensor | None = None
        if self._part.ops:
            x, y, within = _mapped(self._part, self._place, self._column, x, y)
        if inside is not None:
            x, y = x * inside, y * inside
        if within is not None:
            x, y = x * within, y * within
        values = self._reader(x, y)
        if within is not None:
            values = torch.where(within[:, None], values, self._fill)
        if inside is not None:
            # Not a product: what lies outside may stand on a pixel that is no number.
            values = values.masked_fill(~inside[:, None], 0)
        return values


def _mapped(part: Part, place: _Place, column: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    x = place.whole(column) * x + place.whole(column + 1)
    y = place.whole(column + 2) * y + place.whole(column + 3)
    if not part.edge:
        return x, y, None
    low_x, high_x, low_y, high_y = (place.whole(column + k) for k in range(4, 8))
    if part.edge == "constant":
        return x, y, (x >= low_x) & (x < high_x) & (y >= low_y) & (y < high_y)
    return _edged(part.edge, x, low_x, high_x), _edged(part.edge, y, low_y, high_y), None


def _edged(edge: str, index: Tensor, low: Tensor, high: Tensor) -> Tensor:
    if edge == "reflect":
        index = low + (index - low).abs()
        index = high - 1 - (high - 1 - index).abs()
    return torch.minimum(torch.maximum(index, low), high - 1)


def _interpolated(
    front: Gather, place: _Place, column: int, taps: _Taps, x: Tensor, y: Tensor, *, nearest: bool, half_pixel_centers: bool
) -> Tensor:
    if front.kind == "resample":
        centre = 0.5 if half_pixel_centers else 0.0
        at_x = (x.float() + centre) * place.number(column) - (0.0 if nearest else centre)
        at_y = (y.float() + centre) * place.number(column + 3) - (0.0 if nearest else centre)
        start_x, count_x = place.whole(column + 1), place.whole(column + 2)
        start_y, count_y = place.whole(column + 4), place.whole(column + 5)
    else:
        at_x, at_y = _projected(front, place, column, x, y)
        sizes = column + (6 if front.kind == "affine" else 9)
        start_x = start_y = torch.zeros_like(place.whole(column))
        count_x = place.whole(sizes)
        count_y = place.whole(sizes + 1)
    if nearest:
        # Masks under a warp round half to even, as ``grid_sample`` does; under a resize a pixel is the square it covers.
        round_off = torch.floor if front.kind == "resample" else torch.round
        return _tap(front, taps, round_off(at_x).long(), round_off(at_y).long(), start_x, count_x, start_y, count_y)
    left, top = torch.floor(at_x), torch.floor(at_y)
    right_share, lower_share = (at_x - left)[:, None], (at_y - top)[:, None]
    left, top = left.long(), top.long()

    def tap(dx: int, dy: int) -> Tensor:
        return _tap(front, taps, left + dx, top + dy, start_x, count_x, start_y, count_y)

    upper = _blended(tap(0, 0), tap(1, 0), right_share)
    lower = _blended(tap(0, 1), tap(1, 1), right_share)
    return _blended(upper, lower, lower_share)


def _blended(first: Tensor, second: Tensor, share: Tensor) -> Tensor:
    """Between two pixels: ``share`` of the second."""
    mean = first * (1 - share) + second * share
    if first.dtype == torch.uint8:
        return mean
    # A share of 0 leaves every bit of the first, whatever the second is: 0 · NaN would be NaN.
    return torch.where(share == 0, first, mean)


def _antialiased(front: Gather, columns: Columns, images: Tensor | Ragged, table: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Every sample by itself. Its numbers are read on the host, which on a CPU costs nothing."""
    made = []
    for sample, row in enumerate(table[:, columns.warp : columns.warp + 6].tolist()):
        taps = _Taps(reader(image_of(images, sample % len(images)), 1), front, columns, _Place(table[sample : sample + 1]))
        own_x = x[sample % len(x), 0]
        own_y = y[sample % len(y), :, 0]

        def window(rows: Tensor, across: Tensor, taps: _Taps = taps) -> Tensor:
            return taps.read(across.long()[None, None, :], rows.long()[None, :, None], None)[0].float()

        made.append(antialiased(window, tuple(row), own_x, own_y, front.filter))
    values = torch.stack(made)
    return values.clamp(0, 255 if dtype_of(images) == torch.uint8 else 1) if front.clamps else values


def _projected(front: Gather, place: _Place, column: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    m = [place.number(column + k) for k in range(6 if front.kind == "affine" else 9)]
    at_x = m[0] * x + (m[1] * y + m[2])
    at_y = m[3] * x + (m[4] * y + m[5])
    if front.kind == "perspective":
        depth = m[6] * x + (m[7] * y + m[8])
        at_x, at_y = at_x / depth, at_y / depth
    # Far outside is outside; a float beyond the whole numbers would not convert to one.
    far = float(MOST_WARPED)
    return torch.nan_to_num(at_x, nan=-far).clamp(-far, far), torch.nan_to_num(at_y, nan=-far).clamp(-far, far)


def _share_inside(front: Gather, place: _Place, column: int, x: Tensor, y: Tensor) -> Tensor:
    """Which share of each pixel a warp takes from inside the frame, (B, 1, h, w)."""
    sizes = column + (6 if front.kind == "affine" else 9)
    shares = []
    for at, count in zip(_projected(front, place, column, x, y), (place.whole(sizes), place.whole(sizes + 1)), strict=True):
        first = torch.round(at) if front.nearest else torch.floor(at)
        second = torch.zeros_like(at) if front.nearest else at - first
        shares.append((1 - second) * ((first >= 0) & (first < count)) + second * ((first >= -1) & (first < count - 1)))
    return (shares[0] * shares[1])[:, None]


def _tap(
    front: Gather,
    taps: _Taps,
    x: Tensor,
    y: Tensor,
    start_x: Tensor,
    count_x: Tensor,
    start_y: Tensor,
    count_y: Tensor,
) -> Tensor:
    inside: Tensor | None = None
    if front.zeros:
        inside = (x >= 0) & (x < count_x) & (y >= 0) & (y < count_y)
    else:
        x, y = torch.minimum(x.clamp(min=0), count_x - 1), torch.minimum(y.clamp(min=0), count_y - 1)
    return taps.read(start_x + x, start_y + y, inside)
