"""Table of the passes of a fused pipeline, for ``Fused.explain``.

A *pass* is one reading and one writing of all images. A *segment* of a pipeline is several ops with one *plan*, which consists
of passes, or a single *fallback module*: a module that is not fused, but run by its library, Kornia or torchvision. *Views* are
several random augmentations of the same images, *ragged* images differ in size, and a *sample* is an image or a clip. An op may
*combine* several images of a sample into one, the *canvas*, before all passes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gpuaug.core.plotting import html_lines, html_table
from gpuaug.fusion.combine_ops import CombineOp, combined_size
from gpuaug.fusion.lower.tree import implicit_transforms
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.ops.geometry import GatherOp, ResampleOp
from gpuaug.fusion.program.intermediates import blurs_in_strips, types_written
from gpuaug.fusion.program.plan import Pass
from gpuaug.fusion.program.program import Program
from gpuaug.fusion.program.segments import Segment
from gpuaug.fusion.table.on_device import device_crop

_ANTIALIAS = {
    "Kornia": "gpuaug.fuse(…, antialias=True) antialiases, as torchvision does by default",
    "torchvision": "With antialias=True, the default, it antialiases",
}
"""Library → advice in the note on downsampling without antialiasing."""

_IMPLICIT_NOTES = {
    False: "nothing to compute, because passes convert images when they read and write them",
    True: "applied to boxes at the end of the pipeline",
}
"""Note on transforms without an op, such as ``v2.ToDtype``. Key: whether they change or remove boxes."""

LEAST_DOWNSAMPLING = 1.5
"""Downsampling factor above which a note warns about skipped pixels."""


@dataclass(frozen=True, slots=True)
class Line:
    """Row of the table: one pass, one fallback module, or one op that combines images."""

    modules: tuple[str, ...]
    """Names of the modules of the user whose ops run in the pass, in order."""
    what: str
    """Short descriptions of the ops of the pass; empty for a fallback module."""
    launches: int | None
    """Number of kernel launches of the Triton backend; ``None`` for a fallback module, because it is not known."""
    read_bytes: int | None
    """Bytes of images read per batch; ``None`` if unknown."""
    written_bytes: int | None
    """Bytes of images written per batch; ``None`` if unknown."""
    reason: str = ""
    """Reason why a fallback module is not fused; empty for a pass."""
    package: str = "Kornia"
    """Library that runs a fallback module: ``"Kornia"`` on the whole batch, ``"torchvision"`` image by image."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Table of the passes and fallback modules of a pipeline, for images of one shape and type, to print."""

    lines: tuple[Line, ...]
    """Rows of the table, in order of execution."""
    shape: tuple[int | None, ...]
    """(B, C, H, W) of the images, or (B, T, C, H, W) of clips; ``None`` for the sides of images that differ in size."""
    executor: str = ""
    """Backend of the last call of the pipeline: ``"triton"`` or ``"torch"``; empty before the first call."""
    notes: tuple[str, ...] = ()
    """Further remarks, such as on downsampling without antialiasing."""
    dtype: torch.dtype = torch.uint8
    """Type of the images."""

    @property
    def launches(self) -> int | None:
        """Number of kernel launches per batch; ``None`` with a fallback module."""
        counts = [line.launches for line in self.lines]
        return None if None in counts else sum(count for count in counts if count is not None)

    def __str__(self) -> str:
        rows = list(self._rows())
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        texts = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
        return "\n".join([self._head(), *texts, *self.notes])

    def _repr_html_(self) -> str:
        return html_lines([self._head()]) + html_table(self._rows()) + html_lines(self.notes)

    def _head(self) -> str:
        """Line above the table: shape and type of the images, and backend."""
        shape = f"({', '.join('any' if side is None else str(side) for side in self.shape)})"
        samples = "images" if len(self.shape) == 4 else "clips"
        return (
            f"{samples} {shape}, {str(self.dtype).removeprefix('torch.')}{f'; run by {self.executor}' if self.executor else ''}"
        )

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the header of the table, then one row of cells per pass or module."""
        yield ("pass", "modules", "what", "launches", "reads", "writes")
        for number, line in enumerate(self.lines, 1):
            yield (
                line.package if line.reason else str(number),
                ", ".join(line.modules),
                f"left to {line.package}{_call_count(line, self.shape)}: {line.reason}" if line.reason else line.what,
                "?" if line.launches is None else str(line.launches),
                _megabytes(line.read_bytes),
                _megabytes(line.written_bytes),
            )


def explanation(program: Program, size: Size, source_dtype: torch.dtype, executor: str, plain_torch: str | None) -> Explanation:
    """Return the table of a pipeline, for images of one size and dtype.

    Args:
        program: Pipeline, translated to ops for images of ``source_dtype``.
        size: Size of the input images; of the first images, if samples have several.
        source_dtype: Dtype of the input images.
        executor: Backend of the last call; empty before the first call.
        plain_torch: Reason why Triton did not run the last call on a GPU, or ``None``.
    """
    size = combined_size(program.combining, size)
    lines: list[Line] = []
    all_segments = program.segments.all_segments(size)
    combining = [op for segment in all_segments for op in segment.all_ops if isinstance(op, CombineOp)]
    is_combined = bool(combining) and program.ends_with_combining  # the canvases are the output, without a pass
    views = program.views
    whole_plan = program.segments.whole_plan(size, masks=False, views=views)
    # Without a plan for the whole pipeline, the passes run once per view.
    run_count = views if whole_plan is None else 1
    samples = size.batch * views
    for segment in all_segments:
        if segment.fallback is not None:
            fallback = segment.fallback
            lines.append(Line((fallback.name,), "", None, None, None, fallback.reason, package=fallback.package))
        passes = segment.plan.passes if segment.plan is not None and not is_combined else ()
        # Images between segments are float32.
        read_dtype = torch.float32 if lines else source_dtype
        last_dtype = program.dtype if segment is all_segments[-1] else torch.float32
        written_dtypes = types_written(passes, read_dtype, last_dtype) if passes else ()
        source_size: Size | None = size
        for pass_, written_dtype in zip(passes, written_dtypes, strict=True):
            # The first pass may need one more launch, which computes the crop windows of ragged images.
            crops_on_device = not lines and whole_plan is not None and device_crop(whole_plan) is not None
            launches = 1 if blurs_in_strips(pass_.front, read_dtype, written_dtype) else pass_.launches
            # Ragged images keep the sizes of the source without a gather. The sizes after a gather are drawn, so not known.
            out_size = source_size if pass_.out.ragged and not pass_.gather_ops else None
            modules = tuple(dict.fromkeys(op.name for op in pass_.ops if not isinstance(op, CombineOp)))
            read = _byte_count(pass_.source, source_size, samples, read_dtype)
            written = _byte_count(pass_.out, out_size, samples, written_dtype)
            lines.append(Line(modules, pass_.describe(), run_count * (launches + crops_on_device), read, written))
            read_dtype, source_size = written_dtype, out_size
    canvas_bytes = _byte_count(size, None, size.batch, source_dtype)
    combined_lines = [
        Line((op.name,), op.summary(), 1 + op.overlays, None, None if canvas_bytes is None else op.groups * canvas_bytes)
        for op in combining
    ]
    implicit = list(implicit_transforms(program.tree))
    notes = []
    for processes_boxes, note in _IMPLICIT_NOTES.items():
        names = [name for name, is_of_boxes in implicit if is_of_boxes == processes_boxes]
        notes += [f"{', '.join(names)}: {note}."] if names else []
    crops = [segment.plan.box_crop for segment in all_segments if segment.plan is not None]
    notes += [
        f"{crop.op.name}: about twenty more small launches, which choose crops by boxes (without Triton a hundred)."
        for crop in crops
        if crop
    ]
    if any(pass_.route_column >= 0 for pass_ in _passes(all_segments)):
        notes.append("Bytes are maxima: a pass between the first and the last skips samples to which none of its ops applies.")
    if crop_name := program.window_crop:
        notes.append(f"{crop_name}: a preceding DecodeStage decodes only the window of each image that is read.")
    backend_notes = () if plain_torch is None else (plain_torch,)
    return Explanation(
        (*combined_lines, *lines),
        size.shape,
        executor,
        (*backend_notes, *_downsampling_notes(all_segments, size), *notes),
        source_dtype,
    )


def _passes(segments: Sequence[Segment]) -> Iterator[Pass]:
    """Yield the passes of all segments, in order."""
    return (pass_ for segment in segments if segment.plan is not None for pass_ in segment.plan.passes)


def _downsampling_notes(segments: Sequence[Segment], size: Size) -> tuple[str, ...]:
    """Return notes about crops and resizes that may downsample without antialiasing, so that they skip pixels.

    ``size``: size of the input images of the pipeline. Without known sizes there are no notes.
    """
    notes = []
    current_size = size
    if not _sizes_known(size):
        return ()
    for op in (op for pass_ in _passes(segments) for op in pass_.ops):
        if isinstance(op, ResampleOp) and not op.filter and not op.nearest:
            factor = op.max_downscaling(current_size)
            if factor > LEAST_DOWNSAMPLING:
                notes.append(
                    f"{op.name} may downsample by {factor:.1f} without antialiasing, which turns details into noise. "
                    f"{_ANTIALIAS[op.package]}."
                )
        if isinstance(op, GatherOp):
            bound = op.out_bounds(current_size)[-1]
            if op.is_random and op.draws_size:  # samples that skip the op keep their size
                sides = np.maximum(bound.height, current_size.height), np.maximum(bound.width, current_size.width)
                bound = bound.to(*sides)
            current_size = bound
    return tuple(notes)


def _byte_count(size: Size, ragged_size: Size | None, samples: int, dtype: torch.dtype) -> int | None:
    """Number of bytes of images or clips; ``None`` if their sizes are not known.

    Args:
        size: Size of the images. Heights and widths of a ragged size are placeholders.
        ragged_size: Size with the heights and widths of ragged images; ``None`` if they are not known.
        samples: Number of images or clips, over all views.
        dtype: Type of the images.
    """
    if not size.ragged:
        area: int = samples * size.height * size.width
    elif ragged_size is None or not _sizes_known(ragged_size):
        return None
    else:
        area = int(np.sum(np.multiply(ragged_size.height, ragged_size.width))) * (samples // ragged_size.batch)
    return area * size.images_per_sample * size.channels * dtype.itemsize


def _sizes_known(size: Size) -> bool:
    """Return whether the size of every image is known."""
    return not size.ragged or len(size.height) == size.batch


def _call_count(line: Line, shape: tuple[int | None, ...]) -> str:
    """Return a description of how often a fallback module is called per batch; empty for one call."""
    sample = "image" if len(shape) == 4 else "clip"
    return "" if line.package == "Kornia" else f", {sample} by {sample}, {shape[0]} calls a batch"


def _megabytes(count: int | None) -> str:
    """Return a number of bytes as text, in MB; ``"?"`` for ``None``."""
    return "?" if count is None else f"{count / 1e6:.1f} MB"
