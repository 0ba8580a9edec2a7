"""Kinds of targets in one form: a flat tensor with the values of all images, and the *owner* of each row.

The owner of a row is the index of its sample, an image or a clip. A *pass* is one kernel that reads and writes all images; a
*plan* is a list of passes. The *parameter table* holds one row of numbers per sample, from which the passes read the parameters
of the ops. A mask *valid* says which boxes are inside the image and large enough.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug.core.errors import DeviceError
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.backends.readers import MaskLayout
from gpuaug.fusion.ops.base import Array, Size
from gpuaug.fusion.ops.boxes import BoxFormat, BoxMapping, apply_matrices, has_positive_area, vertices
from gpuaug.fusion.ops.torchvision.target_conversions import TargetConversions
from gpuaug.fusion.program.plan import Canvases, Plan

TARGET_DICT_FORMATS: dict[str, BoxFormat] = {
    "xyxy": BoxFormat("corners", edges=True),
    "xywh": BoxFormat("sides", edges=True),
    "cxcywh": BoxFormat("centre", edges=True),
    "cxcywh_share": BoxFormat("centre", edges=True, share=True),
}
"""Format of boxes for each value of ``fuse(…, boxes=…)``. The first three are torchvision's names in lower case."""

POINTS = BoxFormat("points", edges=True)
"""Format of keypoints in target dicts."""


class Points:
    """Boxes or keypoints.

    Args:
        values: (n, …) with ``owners``, or (B, N, …) for N boxes per image.
        box_format: Format of ``values``.
        dtype: dtype of the result.
        owners: Owner of each row, on the host; ``None`` for (B, N, …).
        valid: Mask of the boxes that are valid, (n,) or (B, N); ``None`` if all are.
        clip: Whether boxes are clipped to the output image, and ``valid`` is computed.
    """

    def __init__(
        self,
        values: Tensor,
        box_format: BoxFormat,
        dtype: torch.dtype,
        owners: Array | None = None,
        valid: Tensor | None = None,
        *,
        clip: bool = False,
    ) -> None:
        self.values, self.valid, self.format = values, valid, box_format
        self.host_arrays = [] if owners is None else [owners]
        """Arrays that the caller copies to the device, into ``device_arrays``."""
        self.device_arrays: Sequence[Tensor] = ()
        self.valid_after_crop: Tensor | None = None
        """Mask of the boxes that are valid after a crop by boxes, (n,) bool; ``None`` without such a crop."""
        self._dtype, self._output_format = dtype, box_format
        self.clip = clip
        """Whether boxes are clipped to the output image, and ``valid`` is computed."""

    def _mapping(
        self, target: BoxFormat, matrix: Tensor, source: Any, out: tuple[int, int], *, clip: bool = False
    ) -> BoxMapping:
        if self.device_arrays:
            return BoxMapping(self.format, target, matrix, source, out, self.device_arrays[0], clip)
        return BoxMapping(self.format, target, matrix, (1, 1), out, clip=clip)

    def corners(self, matrix: Tensor, source: Any) -> tuple[Tensor, Tensor]:
        """Transform the boxes by ``matrix``, (B, 3, 3) float32, which maps input to output pixel centres.

        Returns:
            (boxes, (n, 4) XYXY float32, with NaN for boxes that are not valid; owners, (n,)).
        """
        mapping = self._mapping(TARGET_DICT_FORMATS["xyxy"], matrix, source, (1, 1))
        corners, _ = dispatch.map_boxes(self.values, None, mapping, torch.float32)
        if self.valid is not None:
            corners = corners.masked_fill(~self.valid[:, None], torch.nan)
        return corners, self.device_arrays[0]

    def transform(self, matrix: Tensor, source: Any, out: tuple[int, int], conversions: TargetConversions) -> None:
        """Transform the values by the matrices of all passes, and compute ``valid``.

        Args:
            matrix: Matrices that map input to output pixel centres, (B, 3, 3) float32.
            source: (height, width) of the input images, or ``Ragged.places``.
            out: (height, width) of the output images.
            conversions: Output format, and size of the smallest valid box. Used for boxes with owners.
        """
        target = self._output_format
        has_owners = bool(self.device_arrays)
        if has_owners and self.clip and conversions.boxes is not None:
            target = TARGET_DICT_FORMATS[conversions.boxes]
        mapping = self._mapping(target, matrix, source, out, clip=self.clip)
        values, valid = dispatch.map_boxes(self.values, self.valid, mapping, self._dtype)
        if valid is not None and self.valid_after_crop is not None:
            values = values * self.valid_after_crop[:, None]
            valid = valid & self.valid_after_crop
        if valid is not None and has_owners and (conversions.min_size > 1 or conversions.min_area > 1):
            valid = valid & _is_large(values, target, out, conversions)
        self.values, self.valid = values, valid

    def apply(self, matrix: Tensor | None) -> None:
        """Transform the values by the matrices of the preceding plans, because Kornia transforms them next.

        ``matrix``: (B, 3, 3); ``None`` for the identity.
        """
        points = vertices(self.values, self.format)
        if self.format.layout != "points":
            if self.valid is not None:
                self.valid = self.valid & has_positive_area(self.values, self.format)
            self.format = BoxFormat("vertices")
        self.values = points if matrix is None else apply_matrices(points, matrix)

    def run(self, plan: Plan, table: Tensor, canvases: Canvases) -> None:
        """Do nothing: boxes and keypoints are transformed once, by the matrices of all passes."""


def _is_large(boxes: Tensor, box_format: BoxFormat, out: tuple[int, int], conversions: TargetConversions) -> Tensor:
    """Return the mask of the boxes that are large enough to be valid, (n,). ``out``: height and width of the images."""
    widths, heights = (boxes[:, 2:] - boxes[:, :2] if box_format.layout == "corners" else boxes[:, 2:]).unbind(1)
    if box_format.share:
        widths, heights = widths * out[1], heights * out[0]
    return (torch.minimum(widths, heights) >= conversions.min_size) & (widths * heights >= conversions.min_area)


class Masks:
    """Masks of all images: one per image or frame, (B · T, C, H, W), or any number per image.

    Args:
        values: (B · T, C, H, W); with ``owners`` (n, 1, H, W), or, if masks differ in size, all pixels, (number of pixels,).
        owners: Owner of each mask, on the host; ``None`` if there is one mask per image or frame.
        spans: (start, height, width) of the masks of each sample in ``values``, in one array (3 · B,), as ``MaskLayout`` takes
            it; ``None`` if all masks have one size.
    """

    def __init__(self, values: Tensor, owners: Array | None = None, spans: Array | None = None) -> None:
        self.values = values
        self.host_arrays = [array for array in (owners, spans) if array is not None]
        """Arrays that the caller copies to the device, into ``device_arrays``."""
        self.device_arrays: Sequence[Tensor] = ()
        self._differ_in_size = spans is not None

    def run(self, plan: Plan, table: Tensor, canvases: Canvases) -> None:
        """Run all masks through the passes of a plan.

        Args:
            plan: Plan for the images.
            table: Parameter table of the plan, (B, columns).
            canvases: Result of ``Plan.canvases``: size of the output of each pass but the last, if images differ in size.

        Cost:
            One launch per pass, some launches for erasing, and, for masks with owners, one that copies the row of the parameter
            table for each mask. Without the last one if the plan has a single pass and images differ in size.
        """
        rows: Tensor | None = None if self.device_arrays else table
        for index, pass_ in enumerate(plan.passes):
            canvas = canvases[index] if pass_.out.ragged else None
            if self._differ_in_size:
                if canvas is None or pass_.gather_ops:
                    owners, spans = self.device_arrays
                    self.values = dispatch.run_mask(pass_, self.values, table, MaskLayout(owners, spans.view(-1, 3)), canvas)
                    self._differ_in_size = False  # the output of a pass has one size for all masks
                continue
            rows = table.index_select(0, self.device_arrays[0]) if rows is None else rows
            self.values = dispatch.run_mask(pass_, self.values, rows, canvas=canvas)


def check_device(name: str, value: Tensor, device: torch.device) -> None:
    """Raise an error if the value with a name is not on the device of the images.

    Raises:
        DeviceError: If ``value`` is not on ``device``.
    """
    if value.device != device:
        raise DeviceError(f"{name} must be on {device}, where the images are, got {value.device}. Move it to that device.")


def owners_of(samples: Sequence[int], counts: Sequence[int]) -> Array:
    """Return the owner of each mask or box. ``counts``: number of masks or boxes of each sample in ``samples``."""
    return np.repeat(np.asarray(samples, np.int64), counts)


def spans_of(samples: Sequence[int], counts: Sequence[int], sides: Sequence[tuple[int, int]], owners: int) -> Array:
    """Return ``spans``, as ``Masks`` takes it.

    Args:
        samples: Index of the image of each tensor of masks.
        counts: Number of masks in each tensor.
        sides: (height, width) of each image.
        owners: Number of owners. If it is less than the number of images, consecutive images have the same owner.
    """
    spans = [(0, 0, 0)] * owners
    images_per_owner = len(sides) // max(owners, 1)
    first = preceding = 0
    for sample, count in zip(samples, counts, strict=True):
        height, width = sides[sample]
        # The kernel adds (index of the mask in the batch) · height · width, also for the masks of earlier images.
        spans[sample // images_per_owner] = first - preceding * height * width, height, width
        first += count * height * width
        preceding += count
    return np.array(spans, np.int64).ravel()


def sides_of(size: Size) -> list[tuple[int, int]]:
    """Return (height, width) of each image as Python integers, which are faster to compare than NumPy's."""
    columns = (side.tolist() if isinstance(side, np.ndarray) else [side] * size.batch for side in (size.height, size.width))
    return list(zip(*columns, strict=True))


def to_device(arrays: Sequence[Array], device: torch.device) -> tuple[Tensor, ...]:
    """Copy flat integer arrays to ``device``, in one asynchronous copy from pinned memory."""
    lengths = [len(array) for array in arrays]
    pinned = torch.empty(sum(lengths), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    np.concatenate(arrays, out=pinned.numpy())
    return torch.split_with_sizes(pinned.to(device, non_blocking=True), lengths)
