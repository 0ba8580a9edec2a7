"""Target dicts: the annotations of each image in one dict, as detection models take them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpuaug.core import batch as batches
from gpuaug.core.columns import Column, TensorColumn, are_plain, are_tensors, columns, joined, plainly, split
from gpuaug.core.errors import ArgumentError, ArgumentTypeError, DeviceError
from gpuaug.core.torchvision_types import HOLDS_NOTHING, type_name
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.ops.boxes import Form, Way, floating
from gpuaug.fusion.ops.torchvision.ending import AS_THEY_CAME, Ending
from gpuaug.fusion.options import BoxForm
from gpuaug.fusion.targets.masks import MaskList, like, owners_of, sides_of, to_device

TARGET_DICT_FORMS: dict[str, Form] = {
    "xyxy": Form("corners", edges=True),
    "xywh": Form("sides", edges=True),
    "cxcywh": Form("centre", edges=True),
    "cxcywh_share": Form("centre", edges=True, share=True),
}
"""By the name that ``fuse`` takes for it; the first three are also torchvision's names, in small letters."""

_POINTS = Form("points", edges=True)

_NO_LISTS = (str, Mapping, Tensor)


class _Found(NamedTuple):
    """Values of one kind, boxes or keypoints, in the order of the samples that have them."""

    samples: list[int]
    keys: Sequence[str]
    values: Sequence[Any]
    tensors: TensorColumn
    """The values. Its facts exist only where all values are tensors."""

    def each(self) -> "zip[tuple[int, str, Any]]":
        """(sample index, key, value) of each."""
        return zip(self.samples, self.keys, self.values, strict=True)


class _Rows:
    """Tensors of one kind, from the samples that have them, to be concatenated; and the number of rows of each."""

    def __init__(self, found: _Found) -> None:
        self.samples, self.keys, self._values, self._tensors = found
        self.counts = [shape[0] if len(shape) == 2 else shape[:-1].numel() for shape in self._tensors.shapes]

    def joined(self) -> Tensor:
        if self._tensors.entry is not None:
            return self._tensors.joined.flatten(0, -2)
        with plainly():
            return torch.cat([value.flatten(0, -2) for value in self._values])

    def split(self, made: Tensor, frame: tuple[int, int], ending: Ending, form: str | None = None) -> Sequence[Tensor]:
        """Each sample's, in the shape, the type and the subclass in which it came; floating where that holds whole numbers.

        Args:
            made: All rows.
            frame: Height and width of the images.
            ending: Whether torchvision's tensors are to leave as plain ones.
            form: Of boxes, where it is another than that in which they came.
        """
        known, entry = self._tensors.shapes, self._tensors.entry
        if entry is not None:
            lengths = [shape[0] for shape in known]
            parts = split(made.view(sum(lengths), *entry), lengths)
        else:
            rows = split(made, self.counts)
            parts = [part.view(shape) for part, shape in zip(rows, known, strict=True)]
        if len(self._tensors.dtypes) > 1:
            parts = [part.to(floating(given.dtype)) for part, given in zip(parts, self._values, strict=True)]
        if are_plain(self._values) or (ending.is_pure and all(map(type_name, self._values))):
            return parts
        return [
            like(part, given, canvas_size=frame, **_named_format(given, form))
            for part, given in zip(parts, self._values, strict=True)
        ]


class TargetDicts:
    """The target dicts of a batch, on their way through the passes.

    Args:
        given: One mapping for each image.
        size: Of the images.
        places: ``Ragged.places`` where images have sizes of their own.
        device: That of the images.
        boxes: What ``boxes`` are, unless they say so themselves. ``bbox`` is COCO's, a corner and the sides.
        ending: What becomes of them in the end.
        frames: Number of mappings that follow one row of the parameter table: the frames of a clip, or one.

    Raises:
        ArgumentTypeError: If it is not one mapping for each image, or what is in one is not what its key says.
        ArgumentError: If what is in one has not the shape that its key says.
        DeviceError: If it is not where the images are.
    """

    def __init__(
        self,
        given: Any,
        size: Size,
        places: Tensor | None,
        device: torch.device,
        boxes: BoxForm,
        ending: Ending = AS_THEY_CAME,
        frames: int = 1,
    ) -> None:
        self._ending = ending
        self._frames = frames
        _check_sequence(given, size.batch)
        self._given: Sequence[Mapping[str, Any]] = given
        self._size, self._device = size, device
        self._source = (size.height, size.width) if places is None else places
        of_keys = columns(given)
        boxes_found = _found(of_keys, "boxes", "bbox")
        points_found = _found(of_keys, "keypoints")
        self._form = _checked_form(boxes_found, device, boxes)
        _check_points(points_found, device)
        sides = sides_of(size)
        for found in (boxes_found, points_found):
            _check_canvases(found, size, sides)
        self._boxes, self._points = _Rows(boxes_found), _Rows(points_found)
        self._valid = _checked_flags(of_keys.get("valid"), self._boxes, device)
        masks = of_keys.get("masks")
        self.masks = MaskList(masks.values, list(masks.samples), size, device, sides) if masks else None
        """The masks of all samples, to be taken through the passes."""
        self.kept: Tensor | None = None
        """Mask of the boxes that a crop by boxes keeps, (n,)."""
        self._box_owners, self._point_owners = self._owners_on_device()

    @property
    def has_boxes(self) -> bool:
        """True if there are boxes."""
        return bool(self._boxes.samples)

    @property
    def has_points(self) -> bool:
        """True if there are boxes or keypoints."""
        return bool(self._boxes.samples or self._points.samples)

    def _owners_on_device(self) -> tuple[Tensor, Tensor]:
        """Which samples boxes and points belong to, and beside it the same for masks, which take it."""
        rows, points, masks = self._boxes, self._points, self.masks
        arrays = [
            owners_of(rows.samples, rows.counts) // self._frames,
            owners_of(points.samples, points.counts) // self._frames,
        ]
        if masks is None:
            of_boxes, of_points = to_device(arrays, self._device)
            return of_boxes, of_points
        # Usually every object has a box and a mask.
        alike = masks.samples == rows.samples and masks.counts == rows.counts
        arrays += [masks.spans] if alike else [masks.spans, owners_of(masks.samples, masks.counts) // self._frames]
        of_boxes, of_points, spans, *of_masks = to_device(arrays, self._device)
        masks.take(of_boxes if alike else of_masks[0], spans)
        return of_boxes, of_points

    def boxes_at(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """All boxes where a matrix takes them: corners, (n, 4) float32, NaN where not valid; and the sample of each, (n,).

        ``matrix`` is as for ``results``.
        """
        if not self._boxes.samples:
            return matrix.new_empty(0, 4), self._box_owners
        way = Way(self._form, TARGET_DICT_FORMS["xyxy"], matrix, self._source, (1, 1), self._box_owners)
        made, _ = dispatch.follow(self._boxes.joined(), None, way, torch.float32)
        valid = self._joined_valid()
        return made if valid is None else made.masked_fill(~valid[:, None], torch.nan), self._box_owners

    def results(self, matrix: Tensor, out: tuple[int, int]) -> Any:
        """The dicts as they came, with what followed the images in them.

        Args:
            matrix: Pixel centres before → after, (B, 3, 3) float32.
            out: Height and width of the images that come out.

        Cost:
            With boxes and keypoints two launches for each kind, whatever the number of images.
        """
        # A copy of a dict is changed; of another mapping the changes alone are kept.
        changes: list[dict[str, Any]] = [record.copy() if type(record) is dict else {} for record in self._given]
        if self._boxes.samples:
            values = self._boxes.joined()
            form = self._form if self._ending.boxes is None else TARGET_DICT_FORMS[self._ending.boxes]
            way = Way(self._form, form, matrix, self._source, out, self._box_owners, clip=True)
            made, valid = dispatch.follow(values, self._joined_valid(), way, floating(values.dtype))
            assert valid is not None
            if self.kept is not None:
                made = made * self.kept[:, None]
                valid = valid & self.kept
            if self._ending.min_size > 1 or self._ending.min_area > 1:
                valid = valid & _is_large(made, form, out, self._ending)
            rows = self._boxes
            parts = rows.split(made, out, self._ending, self._ending.boxes), split(valid, rows.counts)
            for sample, key, part, kept in zip(rows.samples, rows.keys, *parts, strict=True):
                change = changes[sample]
                change[key] = part
                change["valid"] = kept
        if self._points.samples:
            values = self._points.joined()
            way = Way(_POINTS, _POINTS, matrix, self._source, out, self._point_owners)
            made, _ = dispatch.follow(values, None, way, floating(values.dtype))
            for sample, part in zip(self._points.samples, self._points.split(made, out, self._ending), strict=True):
                changes[sample]["keypoints"] = part
        if self.masks is not None:
            for sample, part in zip(self.masks.samples, self.masks.results(self._ending), strict=True):
                changes[sample]["masks"] = part
        if self._ending.is_pure:
            for record, change in zip(self._given, changes, strict=True):
                for name, value in (change if type(record) is dict else {**record, **change}).items():
                    if type(value) not in HOLDS_NOTHING and type_name(value):
                        change[name] = value.as_subclass(Tensor)
        done = [
            change if type(record) is dict else batches.replace(record, change)
            for record, change in zip(self._given, changes, strict=True)
        ]
        return tuple(done) if isinstance(self._given, tuple) else done

    def _joined_valid(self) -> Tensor | None:
        """Mask of the input boxes that were valid; ``None`` if no sample has ``valid``."""
        if not self._valid:
            return None
        if len(self._valid) == len(self._boxes.samples):
            return joined(list(self._valid.values()))
        parts = zip(self._boxes.samples, self._boxes.counts, strict=True)
        return torch.cat(
            [
                self._valid[sample] if sample in self._valid else torch.ones(count, dtype=torch.bool, device=self._device)
                for sample, count in parts
            ]
        )


def _named_format(given: Tensor, form: str | None) -> dict[str, Any]:
    """``form`` as a torchvision ``BoundingBoxes`` says it."""
    known = getattr(given, "format", None)
    return {} if form is None or known is None else {"format": type(known)[form.upper()]}


def _is_large(boxes: Tensor, form: Form, frame: tuple[int, int], ending: Ending) -> Tensor:
    """Mask of the boxes that are large enough to be valid, (n,)."""
    across, down = (boxes[:, 2:] - boxes[:, :2] if form.layout == "corners" else boxes[:, 2:]).unbind(1)
    if form.share:
        across, down = across * frame[1], down * frame[0]
    return (torch.minimum(across, down) >= ending.min_size) & (across * down >= ending.min_area)


def check_canvas(name: str, value: Tensor, size: Size) -> None:
    """Refuse torchvision's boxes and keypoints that belong to images of another size.

    Raises:
        ArgumentError: If ``canvas_size`` of ``value`` is not (height, width) of ``size``.
    """
    canvas = getattr(value, "canvas_size", None)
    if canvas is not None and tuple(canvas) != (size.height, size.width):
        raise ArgumentError(
            f"canvas_size of {name} must be the size of the image, {(size.height, size.width)}, got {tuple(canvas)}. Resize "
            "boxes with their image: pass both to the transform that resizes in the dataset."
        )


def _check_sequence(given: Any, batch: int) -> None:
    if isinstance(given, _NO_LISTS) or not isinstance(given, Sequence):
        raise ArgumentTypeError(
            f"targets must be a list of one dict for each image, got {type(given).__name__}. Where boxes are padded to one "
            "number, name each of their tensors by a data key: bbox_xyxy, valid."
        )
    if len(given) != batch:
        raise ArgumentError(
            f"targets must hold one dict for each of the {batch} images, got {len(given)}. Pass a batch of them."
        )
    for sample, record in enumerate(given):
        if type(record) is not dict and not isinstance(record, Mapping):
            raise ArgumentTypeError(
                f"targets of sample {sample} must be a dict, got {type(record).__name__}. "
                "Put what is known of an image into one: {'boxes': …, 'labels': …}."
            )


def _found(of_keys: Mapping[str, Column], *keys: str) -> _Found:
    """The values of one kind, which has these keys."""
    named = [(key, of_keys[key]) for key in keys if key in of_keys]
    if len(named) == 1:
        ((key, column),) = named
        return _Found(list(column.samples), [key] * len(column.values), column.values, TensorColumn(column.values))
    # The keys of one sample stay in their order.
    rows = sorted(
        ((sample, key, value) for key, column in named for sample, value in zip(*column, strict=True)), key=lambda row: row[0]
    )
    values = [row[2] for row in rows]
    return _Found([row[0] for row in rows], [row[1] for row in rows], values, TensorColumn(values))


def _are_on(tensors: TensorColumn, device: torch.device) -> bool:
    """Whether all values of a column are tensors on the device."""
    return are_tensors(tensors.tensors) and tensors.devices <= {device}


def _checked_form(found: _Found, device: torch.device, default: str) -> Form:
    """What all boxes are, each of which says so by its type, or by its key, or is as by ``default``."""
    if not found.values:
        return TARGET_DICT_FORMS[default]
    if _are_alike(found, device):  # or the loop finds which is not
        return TARGET_DICT_FORMS[_form_named(*next(found.each()), default)]
    form: Form | None = None
    first = last = -1
    for sample, key, value in found.each():
        _check_tensor(sample, key, value, device)
        named = _form_named(sample, key, value, default)
        shape = value.shape
        if len(shape) != 2 or shape[1] != 4:
            raise ArgumentError(
                f"{key} of sample {sample} must be (n, 4), got {tuple(shape)}. Where an image has none: torch.zeros(0, 4)."
            )
        if sample == last:
            raise ArgumentError(f"targets of sample {sample} must hold boxes or bbox, got both. Leave one of them out.")
        last = sample
        if not shape[0]:  # of no boxes every form is the same
            continue
        if form is None:
            form = TARGET_DICT_FORMS[named]
            first = sample
        elif form is not TARGET_DICT_FORMS[named]:
            raise ArgumentError(
                f"{key} of sample {sample} must be of the form of those of sample {first}, got {named}. "
                "Convert them before they are put into a batch."
            )
    return form or TARGET_DICT_FORMS[default]


def _are_alike(found: _Found, device: torch.device) -> bool:
    """Whether all are (n, 4) on the device, of one key, and say the same of themselves."""
    if not _are_on(found.tensors, device) or len(set(found.keys)) > 1:
        return False
    if found.tensors.entry != (4,):
        return False
    if are_plain(found.values):
        return True
    attributes = list(map(vars, found.values))
    return all(len({each.get(name) for each in attributes}) == 1 for name in ("format", "clamping_mode"))


def _form_named(sample: int, key: str, value: Any, default: str) -> str:
    """Name of the form of one sample's boxes."""
    return (None if type(value) is Tensor else _form_of(value, sample)) or ("xywh" if key == "bbox" else default)


def _check_points(found: _Found, device: torch.device) -> None:
    if _are_on(found.tensors, device):
        known_shapes = found.tensors.shapes
        if all(len(shape) > 1 and shape[-1] in (2, 3) for shape in known_shapes) and len({s[-1] for s in known_shapes}) < 2:
            return
    known: int | None = None
    for sample, key, value in found.each():
        _check_tensor(sample, key, value, device)
        if value.ndim < 2 or value.shape[-1] not in (2, 3) or known not in (None, value.shape[-1]):
            wanted = "(n, K, 2) or (n, K, 3)" if known is None else f"(n, K, {known}), as those before it"
            raise ArgumentError(
                f"{key} of sample {sample} must be {wanted}, got {tuple(value.shape)}. "
                "Where an image has none: torch.zeros(0, K, 3)."
            )
        known = value.shape[-1]


def _check_canvases(found: _Found, size: Size, sides: Sequence[tuple[int, int]]) -> None:
    if are_plain(found.values) or not are_tensors(found.values):
        return
    canvases = [vars(value).get("canvas_size") for value in found.values]
    if canvases == sides:
        return
    for (sample, key, value), canvas in zip(found.each(), canvases, strict=True):
        if canvas is not None and canvas != sides[sample]:
            check_canvas(f"{key} of sample {sample}", value, size.of(sample))


def _check_tensor(sample: int, key: str, value: Any, device: torch.device) -> None:
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(
            f"{key} of sample {sample} must be a tensor, got {type(value).__name__}. Make one of it: torch.as_tensor(…)."
        )
    if value.device != device:
        raise DeviceError(
            f"{key} of sample {sample} must be on {device}, where the images are, got {value.device}. Move it there first."
        )


def _form_of(boxes: Tensor, sample: int) -> str | None:
    """The form that a torchvision ``BoundingBoxes`` has by itself."""
    found = getattr(boxes, "format", None)
    if found is None:
        return None
    if getattr(boxes, "clamping_mode", "soft") is None:
        raise ArgumentError(
            f"clamping_mode of boxes of sample {sample} must be 'soft' or 'hard', got None. Boxes end at the frame here: "
            "leave it out."
        )
    name = str(getattr(found, "value", found)).lower()
    if name not in TARGET_DICT_FORMS:
        raise ArgumentError(
            f"boxes of sample {sample} must be upright, got {name.upper()}. Pass the boxes around their corners, (n, 4, 2): "
            "torch.cat((corners.amin(1), corners.amax(1)), 1)."
        )
    return name


def _checked_flags(column: Column | None, boxes: _Rows, device: torch.device) -> dict[int, Tensor]:
    """``valid`` of each sample that has boxes and says so."""
    if column is None:
        return {}
    flags = dict(zip(*column, strict=True))
    counts = {sample: count for sample, count in zip(boxes.samples, boxes.counts, strict=True) if sample in flags}
    values = [flags[sample] for sample in counts]
    tensors = TensorColumn(values)
    fit = _are_on(tensors, device) and tensors.dtypes <= {torch.bool}
    if not fit or tensors.shapes != [(count,) for count in counts.values()]:
        for sample, count in counts.items():
            _check_valid(flags[sample], sample, count, device)
    return dict(zip(counts, values, strict=True))


def _check_valid(value: Any, sample: int, count: int, device: torch.device) -> None:
    if not isinstance(value, Tensor) or value.dtype != torch.bool or tuple(value.shape) != (count,):
        got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ArgumentError(
            f"valid of sample {sample} must be one bool for each of its {count} boxes, got {got}. Leave it out if all are."
        )
    if value.device != device:
        raise DeviceError(f"valid of sample {sample} must be on {device}, got {value.device}. Move it there first.")
