"""What became of a pipeline, as a table to read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gpuaug.core.plotting import html_lines, html_table
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.ops.geometry import GatherOp, ResampleOp
from gpuaug.fusion.policies.random_apply import RandomApply
from gpuaug.fusion.program.intermediates import in_strips, types_written
from gpuaug.fusion.program.plan import Pass
from gpuaug.fusion.program.segments import Segment, Segments
from gpuaug.fusion.table.on_device import device_crop

_WEIGHS = {
    "Kornia": "torchvision weighs all that fall on one, and so does gpuaug.fuse(…, antialias=True)",
    "torchvision": "With antialias=True, its default, it weighs all that fall on one",
}

SHRINKS = 1.5
"""Factor of shrinking up to which there is no note about skipped pixels."""


@dataclass(frozen=True, slots=True)
class Line:
    """One pass, or one module that its own library runs."""

    modules: tuple[str, ...]
    """Their names, in order."""
    what: str
    """What is computed; empty where its library runs it."""
    launches: int | None
    """Kernels that the Triton executor launches; ``None``: as many as the library wants."""
    read_bytes: int | None
    """Bytes of the images read, per batch; ``None`` where that is not known."""
    written_bytes: int | None
    """Bytes of the images written, per batch; ``None`` where that is not known."""
    reason: str = ""
    """Why its library runs it."""
    at_most: bool = False
    """Whether ``launches`` is the most that a batch takes, by what it picks."""
    package: str = "Kornia"
    """Whose module it is, where its library runs it: ``"Kornia"`` on the whole batch, ``"torchvision"`` image by image."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What became of each module, for images of one shape and type. Print it."""

    lines: tuple[Line, ...]
    """In the order in which they run."""
    shape: tuple[int | None, ...]
    """(B, C, H, W) of the images, or (B, T, C, H, W) of clips; ``None`` for the sides of images that differ in size."""
    executor: str = ""
    """What ran the last call: ``"triton"``, ``"torch"``, or nothing before the first."""
    notes: tuple[str, ...] = ()
    """What a user should know besides."""
    dtype: torch.dtype = torch.uint8
    """Type of the images."""

    @property
    def launches(self) -> int | None:
        """Kernels a batch, or the most where batches pick what runs; ``None`` where a library runs some of it."""
        counts = [line.launches for line in self.lines]
        return None if None in counts else sum(count for count in counts if count is not None)

    def __str__(self) -> str:
        rows = list(self._rows())
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
        return "\n".join([self._head(), *lines, *self.notes])

    def _repr_html_(self) -> str:
        return html_lines([self._head()]) + html_table(self._rows()) + html_lines(self.notes)

    def _head(self) -> str:
        shape = f"({', '.join('any' if side is None else str(side) for side in self.shape)})"
        what = "images" if len(self.shape) == 4 else "clips"
        return f"{what} {shape}, {str(self.dtype).removeprefix('torch.')}{f'; run by {self.executor}' if self.executor else ''}"

    def _rows(self) -> Iterator[tuple[str, ...]]:
        yield ("pass", "modules", "what", "launches", "reads", "writes")
        for number, line in enumerate(self.lines, 1):
            yield (
                line.package if line.reason else str(number),
                ", ".join(line.modules),
                f"left to {line.package}{_how(line, self.shape)}: {line.reason}" if line.reason else line.what,
                "?" if line.launches is None else f"up to {line.launches}" if line.at_most else str(line.launches),
                _megabytes(line.read_bytes),
                _megabytes(line.written_bytes),
            )


def explanation(
    segments: Segments,
    size: Size,
    dtype: torch.dtype,
    executor: str,
    views: int = 1,
    done: Sequence[tuple[str, bool]] = (),
    *,
    source_dtype: torch.dtype,
    plain_torch: str | None = None,
) -> Explanation:
    """Describe the segments of a pipeline, for images of one size and of dtype ``source_dtype``.

    ``done``: names of the transforms without an op, and whether each changes boxes. ``plain_torch``: reason why Triton did not
    run the last call on a GPU, or ``None``.
    """
    lines: list[Line] = []
    all_segments = segments.all(size)
    whole = segments.whole(size, masks=False, views=views)
    runs = views if whole is None else 1
    for segment in all_segments:
        if isinstance(segment.eager, RandomApply):
            lines.append(_choice_line(segment.eager, size, runs))
        elif segment.eager is not None:
            eager = segment.eager
            lines.append(Line((eager.name,), "", None, None, None, eager.reason, package=eager.package))
        passes = segment.plan.passes if segment.plan is not None else ()
        read = torch.float32 if lines else source_dtype
        types = types_written(passes, read, dtype if segment is all_segments[-1] else torch.float32) if passes else ()
        source_size: Size | None = size
        for step, written in zip(passes, types, strict=True):
            crops_on_device = not lines and whole is not None and device_crop(whole) is not None
            launches = 1 if in_strips(step.front, read, written) else step.launches
            out_size = source_size if step.out.ragged and not step.moves else None
            lines.append(
                _line(
                    step,
                    source_size,
                    out_size,
                    size.batch * views,
                    (read.itemsize, written.itemsize),
                    runs * (launches + crops_on_device),
                )
            )
            read, source_size = written, out_size
    names_by_note = {
        "nothing left to do, as passes convert images where they read and write them": [
            name for name, of_boxes in done if not of_boxes
        ],
        "of boxes, where the pipeline ends": [name for name, of_boxes in done if of_boxes],
    }
    notes = [f"{', '.join(names)}: {what}." for what, names in names_by_note.items() if names]
    crops = [segment.plan.box_crop for segment in all_segments if segment.plan is not None]
    notes += [f"{crop.op.name}: about a hundred small launches more, which choose crops by boxes." for crop in crops if crop]
    if any(step.route_column >= 0 for step in _passes(all_segments)):
        notes.append("Bytes are the most: a pass between the first and the last skips samples that nothing in it applies to.")
    slow = () if plain_torch is None else (plain_torch,)
    return Explanation(tuple(lines), size.shape, executor, (*slow, *_shrinking(all_segments, size), *notes), source_dtype)


def _passes(segments: Sequence[Segment]) -> Iterator[Pass]:
    return (step for segment in segments if segment.plan is not None for step in segment.plan.passes)


def _shrinking(segments: Sequence[Segment], size: Size) -> tuple[str, ...]:
    """Return notes about crops and resizes that shrink images without antialiasing, so that pixels are skipped."""
    notes = []
    current_size = size
    if not _known(size):
        return ()
    for op in (op for step in _passes(segments) for op in step.ops):
        if isinstance(op, ResampleOp) and not op.filter and not op.nearest:
            factor = op.shrinks(current_size)
            if factor > SHRINKS:
                notes.append(
                    f"{op.name} may shrink by {factor:.1f} and reads four pixels for each: details turn to noise. "
                    f"{_WEIGHS[op.package]}."
                )
        if isinstance(op, GatherOp):
            current_size = op.out_bounds(current_size)[-1]
    return tuple(notes)


def _choice_line(choice: RandomApply, size: Size, runs: int) -> Line:
    # For the input size, because picked ops rarely change the size.
    fallbacks, launches = choice.fallbacks(size), choice.most_launches(size)
    description = f"{choice.describe()}{'; left to Kornia: ' if fallbacks else ''}{', '.join(fallbacks)}"
    return Line((choice.name,), description, None if launches is None else runs * launches, None, None, at_most=True)


def _line(step: Pass, at: Size | None, out: Size | None, samples: int, itemsizes: tuple[int, int], launches: int) -> Line:
    """Line of one pass.

    Args:
        step: The pass.
        at: Size of the images that it reads, where these differ in size; ``None`` if it is drawn.
        out: Size of the images that it writes, where these differ in size; ``None`` if it is drawn.
        samples: Number of images, or of clips.
        itemsizes: Bytes of each value that the pass reads, and of each that it writes.
        launches: Number of kernels.
    """
    read, written = (
        None if (values := _values(side, known, samples)) is None else values * itemsize
        for side, known, itemsize in zip((step.source, step.out), (at, out), itemsizes, strict=True)
    )
    names = tuple(dict.fromkeys(op.name for op in step.ops))
    return Line(names, step.describe(), launches, read, written)


def _values(size: Size, drawn: Size | None, samples: int) -> int | None:
    """Number of values of all images; ``None`` if their sizes are not known. ``drawn``: sizes, where images differ in size."""
    if not size.ragged:
        values: int = samples * size.each * size.channels * size.height * size.width
        return values
    if drawn is None or not _known(drawn):
        return None
    return int(np.sum(np.multiply(drawn.height, drawn.width))) * (samples // drawn.batch) * size.each * size.channels


def _known(size: Size) -> bool:
    """Whether each image's size is known, where they differ."""
    return not size.ragged or len(size.height) == size.batch


def _how(line: Line, shape: tuple[int | None, ...]) -> str:
    """How a library runs a module of its own, in words."""
    one = "image" if len(shape) == 4 else "clip"
    return "" if line.package == "Kornia" else f", {one} by {one}, {shape[0]} calls a batch"


def _megabytes(count: int | None) -> str:
    return "?" if count is None else f"{count / 1e6:.1f} MB"
