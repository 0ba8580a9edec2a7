"""Target dicts: what is known of each image, in a dict of its own, as detection models take it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug import batch as batches
from gpuaug.errors import ArgumentError, ArgumentTypeError, DeviceError
from gpuaug.fuse import executors
from gpuaug.fuse.boxes import Form, Way, floating
from gpuaug.fuse.masks import MaskList, like, to_device
from gpuaug.fuse.ops import Array, Size
from gpuaug.fuse.options import BoxForm

RECORD_FORMS: dict[str, Form] = {
    "xyxy": Form("corners", edges=True),
    "xywh": Form("sides", edges=True),
    "cxcywh": Form("centre", edges=True),
    "cxcywh_share": Form("centre", edges=True, share=True),
}
"""By the name that ``fuse`` takes for it; the first three are also torchvision's names, in small letters."""

_POINTS = Form("points", edges=True)


class _Rows:
    """Tensors of one kind, of those samples that have them, to be laid one behind the other: so many rows each."""

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.keys: list[str] = []
        self.given: list[Tensor] = []
        self.counts: list[int] = []
        self._parts: list[Tensor] = []
        self._dtypes = set[torch.dtype]()

    def add(self, sample: int, key: str, value: Tensor) -> None:
        plain = value if type(value) is Tensor else value.as_subclass(Tensor)
        plain = plain if plain.ndim == 2 else plain.flatten(0, -2)
        self.samples.append(sample)
        self.keys.append(key)
        self.given.append(value)
        self.counts.append(plain.shape[0])
        self._parts.append(plain)
        self._dtypes.add(plain.dtype)

    def owners(self) -> Array:
        """Which sample each row belongs to."""
        return np.repeat(np.asarray(self.samples, np.int64), self.counts)

    def joined(self) -> Tensor:
        return torch.cat(self._parts)

    def split(self, made: Tensor, frame: tuple[int, int]) -> list[Tensor]:
        """Each sample's, in the shape, the type and the subclass in which it came; floating where that holds whole numbers."""
        parts = torch.split_with_sizes(made, self.counts)
        if len(self._dtypes) > 1:
            parts = tuple(part.to(floating(given.dtype)) for part, given in zip(parts, self.given, strict=True))
        return [
            like(part if given.ndim == 2 else part.view(given.shape), given, canvas_size=frame)
            for part, given in zip(parts, self.given, strict=True)
        ]


class Records:
    """The target dicts of a batch, on their way through the passes.

    Args:
        given: One mapping for each image.
        size: Of the images.
        places: Where images have sizes of their own, these on the device: (B, 3), with height and width last.
        device: That of the images.
        boxes: What ``boxes`` are, unless they say so themselves. ``bbox`` is COCO's, a corner and the sides.

    Raises:
        ArgumentTypeError: If it is not one mapping for each image, or what is in one is not what its key says.
        ArgumentError: If what is in one has not the shape that its key says.
        DeviceError: If it is not where the images are.
    """

    def __init__(self, given: Any, size: Size, places: Tensor | None, device: torch.device, boxes: BoxForm) -> None:
        _check_sequence(given, size.batch)
        self._given: Sequence[Mapping[str, Any]] = given
        self._size, self._places, self._device = size, places, device
        self._form: Form | None = None
        self._named: str = boxes
        self._boxes, self._points, self._valid = _Rows(), _Rows(), dict[int, Tensor]()
        masks, mask_samples = [], []
        for sample, record in enumerate(given):
            for key in ("boxes", "bbox"):
                if key in record:
                    self._add_boxes(sample, key, record)
            if "keypoints" in record:
                self._add_points(sample, record["keypoints"])
            if "masks" in record:
                masks.append(record["masks"])
                mask_samples.append(sample)
        self._mask_samples = mask_samples
        self.masks = MaskList(masks, mask_samples, size, device) if masks else None
        """The masks of all samples, to be taken through the passes."""
        arrays = [self._boxes.owners(), self._points.owners(), *(self.masks.numbers() if self.masks else ())]
        self._box_owners, self._point_owners, *of_masks = to_device(arrays, device)
        if self.masks is not None:
            self.masks.take(of_masks)

    @property
    def has_points(self) -> bool:
        """Whether boxes or keypoints follow."""
        return bool(self._boxes.samples or self._points.samples)

    def results(self, matrix: Tensor, out: tuple[int, int]) -> Any:
        """The dicts as they came, with what followed the images in them.

        Args:
            matrix: Pixel centres before → after, (B, 3, 3) float32.
            out: Height and width of the images that come out.

        Cost:
            With boxes and keypoints two launches for each kind, whatever the number of images.
        """
        changes: list[dict[str, Any]] = [{} for _ in self._given]
        source = (self._size.height, self._size.width) if self._places is None else self._places
        if self._boxes.samples:
            form = self._form or RECORD_FORMS[self._named]
            values = self._boxes.joined()
            way = Way(form, form, matrix, source, out, self._box_owners, clip=True)
            made, valid = executors.follow(values, self._joined_valid(), way, floating(values.dtype))
            assert valid is not None
            rows = self._boxes
            split = rows.split(made, out), torch.split_with_sizes(valid, rows.counts)
            for sample, key, part, kept in zip(rows.samples, rows.keys, *split, strict=True):
                changes[sample][key] = part
                changes[sample]["valid"] = kept
        if self._points.samples:
            values = self._points.joined()
            way = Way(_POINTS, _POINTS, matrix, source, out, self._point_owners)
            made, _ = executors.follow(values, None, way, floating(values.dtype))
            for sample, part in zip(self._points.samples, self._points.split(made, out), strict=True):
                changes[sample]["keypoints"] = part
        if self.masks is not None:
            for sample, part in zip(self._mask_samples, self.masks.results(), strict=True):
                changes[sample]["masks"] = part
        done = [
            {**record, **change} if type(record) is dict else batches.replace(record, change)
            for record, change in zip(self._given, changes, strict=True)
        ]
        return tuple(done) if isinstance(self._given, tuple) else done

    def _add_boxes(self, sample: int, key: str, record: Mapping[str, Any]) -> None:
        value = record[key]
        self._check_rows(sample, key, value)
        named = _form_of(value, sample) or ("xywh" if key == "bbox" else self._named)
        shape = value.shape
        if len(shape) != 2 or shape[1] != 4:
            raise ArgumentError(
                f"{key} of sample {sample} must be (n, 4), got {tuple(shape)}. Where an image has none: torch.zeros(0, 4)."
            )
        if self._boxes.samples and self._boxes.samples[-1] == sample:
            raise ArgumentError(f"targets of sample {sample} must hold boxes or bbox, got both. Leave one of them out.")
        count = shape[0]
        if count:  # of no boxes every form is the same
            form = RECORD_FORMS[named]
            if self._form is not form and self._form is not None:
                first = next(at for at, held in zip(self._boxes.samples, self._boxes.counts, strict=True) if held)
                raise ArgumentError(
                    f"{key} of sample {sample} must be of the form of those of sample {first}, got {named}. "
                    "Convert them before they are put into a batch."
                )
            self._form = form
        self._boxes.add(sample, key, value)
        if "valid" in record:
            self._valid[sample] = _checked_valid(record["valid"], sample, count, self._device)

    def _add_points(self, sample: int, value: Any) -> None:
        self._check_rows(sample, "keypoints", value)
        known = self._points.given[0].shape[-1] if self._points.given else None
        if value.ndim < 2 or value.shape[-1] not in (2, 3) or known not in (None, value.shape[-1]):
            wanted = "(n, K, 2) or (n, K, 3)," if known is None else f"(n, K, {known}), as those before it,"
            raise ArgumentError(
                f"keypoints of sample {sample} must be {wanted} got {tuple(value.shape)}. "
                "Where an image has none: torch.zeros(0, K, 3)."
            )
        self._points.add(sample, "keypoints", value)

    def _check_rows(self, sample: int, key: str, value: Any) -> None:
        if not isinstance(value, Tensor):
            raise ArgumentTypeError(
                f"{key} of sample {sample} must be a tensor, got {type(value).__name__}. Make one of it: torch.as_tensor(…)."
            )
        if value.device != self._device:
            raise DeviceError(
                f"{key} of sample {sample} must be on {self._device}, where the images are, got {value.device}. "
                "Move it there first."
            )

    def _joined_valid(self) -> Tensor | None:
        """Which boxes were valid when they came; nothing where no sample says so."""
        if not self._valid:
            return None
        parts = zip(self._boxes.samples, self._boxes.counts, strict=True)
        return torch.cat(
            [
                self._valid[sample] if sample in self._valid else torch.ones(count, dtype=torch.bool, device=self._device)
                for sample, count in parts
            ]
        )


def _check_sequence(given: Any, batch: int) -> None:
    if isinstance(given, str | Mapping | Tensor) or not isinstance(given, Sequence):
        raise ArgumentTypeError(
            f"targets must be a list of one dict for each image, got {type(given).__name__}. Where boxes are padded to one "
            "number, name each of their tensors by a data key: bbox_xyxy, valid."
        )
    if len(given) != batch:
        raise ArgumentError(
            f"targets must hold one dict for each of the {batch} images, got {len(given)}. Pass a batch of them."
        )
    for sample, record in enumerate(given):
        if not isinstance(record, Mapping):
            raise ArgumentTypeError(
                f"targets of sample {sample} must be a dict, got {type(record).__name__}. "
                "Put what is known of an image into one: {'boxes': …, 'labels': …}."
            )


def _form_of(boxes: Tensor, sample: int) -> str | None:
    """The form that a torchvision ``BoundingBoxes`` has by itself."""
    found = None if type(boxes) is Tensor else getattr(boxes, "format", None)
    if found is None:
        return None
    name = str(getattr(found, "value", found)).lower()
    if name not in RECORD_FORMS:
        raise ArgumentError(
            f"boxes of sample {sample} must be upright, got {name.upper()}. Convert them to XYXY: "
            "torchvision.transforms.v2.functional.convert_bounding_box_format."
        )
    return name


def _checked_valid(value: Any, sample: int, count: int, device: torch.device) -> Tensor:
    if not isinstance(value, Tensor) or value.dtype != torch.bool or tuple(value.shape) != (count,):
        got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ArgumentError(
            f"valid of sample {sample} must be one bool for each of its {count} boxes, got {got}. Leave it out if all are."
        )
    if value.device != device:
        raise DeviceError(f"valid of sample {sample} must be on {device}, got {value.device}. Move it there first.")
    return value
