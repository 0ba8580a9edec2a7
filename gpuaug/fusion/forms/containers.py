"""Targets in containers: target dicts, torchvision's tensors in any container, and lists of masks.

A *target dict* holds the annotations of one image, such as ``{"boxes": …, "labels": …}``. Target dicts are *packed* if the
values of all images under one key are one tensor. A *column* is the values of all images at one *path*: at the same keys, field
names and indices, such as the boxes of all target dicts. The targets of a column become one *slot* (``kinds.py``), which
checks them, concatenates them into one tensor for the passes, and splits the result. The samples of a column are images or
clips, or with ``per_frame`` the frames of clips.

A container is walked once, before the passes. Methods ``_read_…`` create a slot for the targets that they find, and return a
function, which is called after the passes and returns a copy of what was read, with the transformed targets; or they return
``None`` if there are no targets to transform.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from gpuaug.core import batch as batches
from gpuaug.core.errors import ArgumentError, ArgumentTypeError
from gpuaug.core.targets import (
    BOXES,
    HOLDS_NOTHING,
    KEYPOINTS,
    MASKS,
    TARGET_KEYS,
    TARGET_TYPES,
    VALID,
    Column,
    FlatColumn,
    Kind,
    PackedColumn,
    PackedTargets,
    columns,
    holds_targets,
    type_name,
    type_name_of,
)
from gpuaug.fusion.forms.call import Call
from gpuaug.fusion.forms.dense import Dense
from gpuaug.fusion.forms.kinds import Slot

_Path = tuple[Any, ...]
"""Keys, field names and indices that lead to a value in a container, without the index of the image."""

_MakeResult = Callable[[], Any]
"""Function that returns a copy of a value with the transformed targets."""

_MakeValues = Callable[[], Sequence[Any]]
"""Function that returns the transformed values of a column, in the order of its samples."""


class Container:
    """Adapter of an input whose targets are in a container.

    In a sequence of B elements, element ``i`` belongs to image ``i``. A tensor outside such a sequence holds one entry per
    image, (B, …). For clips of T frames, a list may hold one list per clip with one element per frame, and keypoints may be
    (B, T, n, 2).

    Args:
        key: Data key, which says what ``value`` holds. ``targets``: one dict per image, in which tensors are recognized by
            their keys, and torchvision's tensors under any key; ``tv_tensors``: a container of torchvision's tensors; ``mask``:
            a list with one tensor of masks per image.
        value: The container.
        call: Images and settings of the call.

    Raises:
        ArgumentError: If a sequence or a tensor does not hold one entry per image.
    """

    def __init__(self, key: str, value: Any, call: Call) -> None:
        self.key, self._call = key, call
        self._batch = call.size.batch
        self.slots: list[Slot] = []
        """Slots of boxes, keypoints and masks, one per column."""
        self.maps: list[Dense] = []
        """Adapters of masks that are one tensor for all images, (B, …): segmentation maps."""
        make_result = self._read_packed(value) if isinstance(value, PackedTargets) else None
        if make_result is None:
            value = value.unpacked() if isinstance(value, PackedTargets) else value
            read = {"targets": self._read_target_dicts, "mask": self._read_mask_list}.get(key)
            make_result = self._read_batch_value(value, ()) if read is None else read(value)
        self.output = make_result or (lambda: value)
        """Function without arguments that returns the container with the transformed targets."""
        self.targets = [slot.target for slot in self.slots]
        """Targets of each slot in the form that the passes transform: ``Points`` or ``Masks`` (``kinds.py``)."""

    @property
    def inner_keys(self) -> list[str]:
        """Data keys of the targets inside of the container, with which a call (``record.py``) checks what a module supports.

        These are ``"mask"`` for each tensor of segmentation maps, and ``"targets"`` if a ``tv_tensors`` input has slots.
        """
        has_slots = self.key == "tv_tensors" and self.slots
        return [*(adapter.key for adapter in self.maps), *(("targets",) if has_slots else ())]

    def _new_slot(self, kind: Kind, path: _Path, column: Column, *, per_frame: bool) -> Slot:
        """Create a slot for the targets of a column, and add it to ``slots``."""
        slot = Slot(kind, path, column, self._call, per_frame)
        self.slots.append(slot)
        return slot

    def _kind_of(self, path: _Path) -> Kind | None:
        """Return the kind of targets at ``path``, if it is a key of target dicts such as ``boxes``, else ``None``.

        The class of the values is then not read.
        """
        return TARGET_KEYS.get(path[0]) if self.key == "targets" and len(path) == 1 else None

    def _read_mask_list(self, value: Sequence[Any]) -> _MakeResult:
        """Read a list of masks, one tensor per image."""
        if not value and not self._batch:
            return lambda: value
        if len(value) != self._batch:
            raise ArgumentError(
                f"mask must hold masks for each of the {self._batch} images, got {len(value)}. Pass one tensor per image."
            )
        slot = self._new_slot(MASKS, (), Column(range(len(value)), value), per_frame=False)
        cls: Any = type(value)
        return lambda: cls(slot.parts())

    def _read_target_dicts(self, value: Any) -> _MakeResult:
        """Read a list of one dict per image or frame, or of one list of dicts per clip."""
        call, frames = self._call, self._call.frames
        is_list = isinstance(value, list | tuple)
        # One list of dicts per clip. A flat list may also have one dict per frame.
        is_nested = frames > 0 and is_list and len(value) > 0 and all(isinstance(clip, list | tuple) for clip in value)
        if is_nested and any(len(clip) != frames for clip in value):
            count = next(len(clip) for clip in value if len(clip) != frames)
            raise ArgumentError(
                f"targets must hold one dict for each of the {frames} frames of a clip, got {count}. "
                "Pass one dict per clip, or one dict per frame."
            )
        records = [record for clip in value for record in clip] if is_nested else value
        per_frame = is_nested or (frames > 1 and is_list and len(value) == call.size.images)
        _check_dicts(records, call.size.images if per_frame else self._batch)
        make_dicts = self._read_records(Column(range(len(records)), records), (), per_frame=per_frame)
        assert make_dicts is not None

        def make_result() -> Any:
            dicts = make_dicts()
            if not per_frame:
                return tuple(dicts) if isinstance(value, tuple) else dicts
            clips = call.output_frames(dicts)  # per clip, the dicts of the frames that the pipeline selects
            return type(value)(map(type(value), clips) if is_nested else chain.from_iterable(clips))

        return make_result

    def _read_packed(self, packed: PackedTargets) -> _MakeResult | None:
        """Read packed target dicts without unpacking them. Return ``None``, with no slots, if they have to be unpacked."""
        columns_by_key = packed.columns()
        target_keys = {*TARGET_KEYS, VALID.name}.intersection(packed.layout.keys)
        accepts_dicts = self.key in ("targets", "tv_tensors")
        # Unpack clips, and dicts that have targets outside of packed columns.
        if self._call.frames or not accepts_dicts or not target_keys <= columns_by_key.keys() or holds_targets(packed.others):
            return None
        self._read_columns(columns_by_key, (), per_frame=False)
        boxes = [slot for slot in self.slots if slot.kind is BOXES]
        # Unpack dicts with several columns of boxes, or with ``valid`` in other dicts than the boxes.
        if len(boxes) > 1 or any(slot.column.samples != columns_by_key.get(VALID.name, slot.column).samples for slot in boxes):
            self.slots.clear()
            return None
        # Local variables, because ``self`` in the function would be a reference cycle: ``self.output`` is the function.
        slots = self.slots

        def make_result() -> PackedTargets:
            valid = [
                FlatColumn(PackedColumn(VALID.name, slot.column.samples, slot.counts), slot.valid)
                for slot in slots
                if slot.valid is not None
            ]
            return packed.with_columns([*(slot.result() for slot in slots), *valid])

        return make_result

    def _read_batch_value(self, value: Any, path: _Path) -> _MakeResult | None:
        """Read a value that holds targets of all images. Return ``None`` if there are no targets in it.

        Args:
            value: The container, or a value in it.
            path: Path of ``value`` in the container.
        """
        if isinstance(value, Tensor):
            return self._read_tensor(value, path)
        call = self._call
        if call.frames and self._is_per_frame(value):
            frame_column = Column(range(call.size.images), list(chain.from_iterable(value)))
            make_values = self._read_column(frame_column, path, per_frame=True)
            if make_values is None:
                return None
            return lambda: type(value)(map(type(value[0]), call.output_frames(make_values())))
        if _is_sequence(value):
            return self._read_sequence(value, path)
        if not batches.is_container(value):
            return None
        makers: dict[Any, _MakeResult] = {}
        boxes: list[Slot] = []
        """Slots of the tensors of boxes that are values of the mapping ``value``."""
        for name in batches.member_names(value):
            inner = batches.member(value, name)
            make_member = self._read_batch_value(inner, (*path, name))
            if make_member is not None:
                makers[name] = make_member
                is_boxes = isinstance(value, Mapping) and type_name(inner) == BOXES.class_name
                boxes += self.slots[-1:] if is_boxes else []  # the slot that the call above has added
        if boxes:  # the result gets the key ``valid``: which boxes of its first tensor of boxes are valid
            makers[VALID.name] = lambda: boxes[0].valid
            if VALID.name in value:
                valid = value[VALID.name]
                samples = boxes[0].column.samples
                # One box per image, (B, 4), has ``valid`` (B,). Otherwise boxes are (n, 4) of a single image, or ``set_valid``
                # raises an error.
                is_one_each = isinstance(valid, Tensor) and valid.shape == (self._batch,)
                flags = Column(samples, valid.split(1) if is_one_each else [valid] * len(samples))
                boxes[0].set_valid(flags, samples)
        return (lambda: batches.replace(value, {name: make() for name, make in makers.items()})) if makers else None

    def _read_sequence(self, value: Sequence[Any], path: _Path) -> _MakeResult | None:
        """Read a sequence with one element per image."""
        if len(value) != self._batch:
            if not holds_targets(value):
                return None
            raise ArgumentError(
                f"A list of masks, boxes or keypoints must hold one element for each of the {self._batch} images, got "
                f"{len(value)}. Put tensors that hold all images into a dict, not into a list."
            )
        self._check_elements(value)
        make_values = self._read_column(Column(range(self._batch), value), path, per_frame=False)
        if make_values is None:
            return None
        return lambda: batches.replace(value, dict(enumerate(make_values())))

    def _read_tensor(self, tensor: Tensor, path: _Path) -> _MakeResult | None:
        """Read a tensor of torchvision's classes outside of a sequence. It holds one entry per image, (B, …)."""
        kind = TARGET_TYPES.get(type_name(tensor))
        if kind is None:
            return None
        call, batch, frames = self._call, self._batch, self._call.frames
        # In a batch of one image, a tensor belongs to that image. Only masks with a batch axis have four axes.
        if batch == 1 and tensor.ndim < 4:
            make_values = self._read_column(Column((0,), (tensor,)), path, per_frame=False)
            assert make_values is not None
            return lambda: make_values()[0]
        if kind is MASKS:
            self.maps.append(Dense(MASKS.keys[MASKS.name], tensor, self._call))
            return self.maps[-1].output
        if not batch:
            return None
        per_frame = kind is KEYPOINTS and bool(frames) and tensor.ndim == 4 and tensor.shape[1] == frames
        expected = self._call.size.images // frames if per_frame else batch
        if not tensor.ndim or len(tensor) != expected:
            raise ArgumentError(
                f"{kind.class_name} must hold one entry for each of the {batch} images, got {tuple(tensor.shape)}. "
                "Pass a list of one tensor per image."
            )
        count = call.size.images if per_frame else batch
        flat = tensor.as_subclass(Tensor).flatten(0, -2)
        packed = PackedColumn("", range(count), [len(flat) // count] * count, None, type(tensor), [vars(tensor)])
        slot = self._new_slot(kind, path, FlatColumn(packed, flat), per_frame=per_frame)

        def make_result() -> Tensor:
            column = slot.result()
            values = column.joined.view(tensor.shape)  # one tensor for all samples
            (result,) = column.packed._replace(lengths=[len(tensor)]).tensors(
                values[:, list(call.frame_indices)] if per_frame else values
            )
            return result

        return make_result

    def _read_column(self, column: Column, path: _Path, *, per_frame: bool) -> _MakeValues | None:
        """Read the values of a column: tensors, or containers of tensors. Return ``None`` if there are no targets in them.

        Args:
            column: The values. Each belongs, with all tensors in it, to one sample.
            path: Path of the values.
            per_frame: Whether the samples of the column are frames.
        """
        kind_of_key = self._kind_of(path)
        count = len(column.samples)
        # (positions in the column, function that returns the transformed values at these positions).
        value_makers: list[tuple[Sequence[int], _MakeValues]] = []
        positions_by_kind = _by_class(column) if kind_of_key is None else {kind_of_key: range(count)}
        for kind, positions in positions_by_kind.items():
            column_of_kind = column if len(positions) == count else column.selected(positions)
            if kind is not None:
                value_makers.append((positions, self._new_slot(kind, path, column_of_kind, per_frame=per_frame).parts))
            elif (make_values := self._read_records(column_of_kind, path, per_frame=per_frame)) is not None:
                value_makers.append((positions, make_values))
        if len(value_makers) == 1 and len(value_makers[0][0]) == count:
            return value_makers[0][1]

        def make_all_values() -> Sequence[Any]:
            values = list(column.values)
            for positions, make_values in value_makers:
                for position, new_value in zip(positions, make_values(), strict=True):
                    values[position] = new_value
            return values

        return make_all_values if value_makers else None

    def _read_columns(
        self, columns_by_key: Mapping[Any, Column], path: _Path, *, per_frame: bool, are_mappings: bool = True
    ) -> list[tuple[Any, Sequence[int], _MakeValues]]:
        """Read the columns of containers, one container per sample, such as target dicts.

        Args:
            columns_by_key: Key, field name or index in the containers → column.
            path: Path of the containers.
            per_frame: Whether the samples of the columns are frames.
            are_mappings: Whether the containers are mappings. Mappings with boxes as values get the key ``valid``.

        Returns:
            (key, sample of each value, function that returns the transformed values) for each column with targets, and for
            ``valid``.

        Raises:
            ArgumentError: If a target dict has boxes under two keys.
        """
        value_makers: list[tuple[Any, Sequence[int], _MakeValues]] = []
        start = len(self.slots)
        box_columns = [columns_by_key[name] for name in BOXES.keys if name in columns_by_key and self._kind_of((*path, name))]
        samples_in_both = set.intersection(*(set(column.samples) for column in box_columns)) if len(box_columns) > 1 else set()
        if samples_in_both:
            sample = min(samples_in_both)
            raise ArgumentError(f"targets of sample {sample} must hold boxes or bbox, got both. Leave one of them out.")
        for name, column in columns_by_key.items():
            if not column.types <= HOLDS_NOTHING or self._kind_of((*path, name)):
                make_values = self._read_column(column, (*path, name), per_frame=per_frame)
                if make_values is not None:
                    value_makers.append((name, column.samples, make_values))
        box_slots = [slot for slot in self.slots[start:] if are_mappings and slot.kind is BOXES and slot.path[:-1] == path]
        # If a dict has several tensors of boxes, its ``valid`` belongs to the boxes under a key of target dicts (``boxes``,
        # ``bbox``), otherwise to the first boxes.
        samples_with_valid: set[int] = set()
        for slot in sorted(box_slots, key=lambda slot: self._kind_of(slot.path) is None):
            samples = slot.column.samples
            if samples_with_valid:
                samples = [sample for sample in samples if sample not in samples_with_valid]
            slot.set_valid(columns_by_key.get(VALID.name), samples)
            samples_with_valid.update(samples)
        return [*value_makers, *((VALID.name, slot.valid_samples, slot.valid_parts) for slot in box_slots)]

    def _read_records(self, column: Column, path: _Path, *, per_frame: bool) -> _MakeValues | None:
        """Read a column of containers, one per sample, by the columns inside them. See ``_read_column``."""
        values, samples = column.values, column.samples
        are_dicts = column.types == {dict}
        records = values
        if not are_dicts:
            records = [{name: batches.member(value, name) for name in batches.member_names(value)} for value in values]
        are_mappings = are_dicts or all(isinstance(value, Mapping) for value in values)
        value_makers = self._read_columns(columns(records, samples), path, per_frame=per_frame, are_mappings=are_mappings)
        position_of = {sample: position for position, sample in enumerate(samples)}
        are_target_dicts = self.key == "targets" and not path  # these are copied even if there are no targets

        def new_records() -> Sequence[Any]:
            # For a dict, its copy, into which the results are written. For another container, only the results.
            changes: list[dict[Any, Any]] = [value.copy() if type(value) is dict else {} for value in values]
            for name, value_samples, make_values in value_makers:
                for sample, new_value in zip(value_samples, make_values(), strict=True):
                    changes[position_of[sample]][name] = new_value
            if are_dicts:
                return changes
            return [
                change if type(value) is dict else batches.replace(value, change) if change or are_target_dicts else value
                for value, change in zip(values, changes, strict=True)
            ]

        return new_records if value_makers or are_target_dicts else None

    def _check_elements(self, elements: Sequence[Any]) -> None:
        """Raise an error if it is ambiguous whether each element of a sequence belongs to one image, or to all images.

        The sequence has B elements. Elements of different types are ambiguous, such as (boxes, masks) for B = 2.
        """
        kinds = sorted(set(map(_annotation_type, elements)) - {""})
        got = " and ".join(kinds)
        if kinds == [MASKS.class_name] and isinstance(elements, tuple) and self._batch > 1 and not self._call.frames:
            shapes = {tuple(element.shape) if isinstance(element, Tensor) else () for element in elements}
            shape = shapes.pop()
            # Each element may be masks of all images, (B, H, W), or B masks of one image. Lists are not ambiguous: collate
            # functions return a list if there is one element per image.
            is_ambiguous = not shapes and len(shape) == 3 and shape[0] == self._batch
            got = f"{self._batch} masks {shape}"
        else:
            is_ambiguous = len(kinds) > 1 and holds_targets(elements)
        if is_ambiguous:
            raise ArgumentError(
                f"A list of {self._batch} elements must hold annotations of one image in each, got {got}, which may hold "
                "annotations of all images. Put tensors that hold all images into a dict, and tensors of one image into a dict "
                "for each image."
            )

    def _is_per_frame(self, value: Any) -> bool:
        """Return whether a value is a list with one list per clip.

        Each inner list has one element per frame. All elements are of one type, or ``None``.
        """
        frames, images = self._call.frames, self._call.size.images
        if type(value) not in (list, tuple) or len(value) * frames != images:
            return False
        if any(type(clip) not in (list, tuple) or len(clip) != frames for clip in value):
            return False
        return len({type(element) for clip in value for element in clip} - {type(None)}) == 1


def _by_class(column: Column) -> dict[Kind | None, Sequence[int]]:
    """Return kind → positions of the tensors of its torchvision class; and ``None`` → positions of the containers."""
    kinds = {cls: TARGET_TYPES.get(type_name_of(cls)) for cls in column.types - HOLDS_NOTHING - {dict}}
    if len(column.types) == 1 and any(kinds.values()):
        return {kind: range(len(column.samples)) for kind in kinds.values()}
    groups: dict[Kind | None, list[int]] = {}
    for position, value in enumerate(column.values):
        kind = kinds.get(type(value))
        if kind is not None or type(value) is dict or (type(value) in kinds and batches.is_container(value)):
            groups.setdefault(kind, []).append(position)
    return groups  # type: ignore[return-value]


def _check_dicts(records: Any, batch: int) -> None:
    """Raise an error if ``records`` is not a list of ``batch`` dicts."""
    if isinstance(records, str | Mapping | Tensor) or not isinstance(records, Sequence):
        raise ArgumentTypeError(
            f"targets must be a list of one dict for each image, got {type(records).__name__}. If boxes are padded to one "
            "number per image, pass the padded tensors as inputs with data keys: bbox_xyxy, valid."
        )
    if len(records) != batch:
        raise ArgumentError(
            f"targets must hold one dict for each of the {batch} images, got {len(records)}. Pass one dict per image."
        )
    # ``set(map(…))`` is fast for lists of dicts.
    for sample, record in enumerate(records) if set(map(type, records)) != {dict} else ():
        if not isinstance(record, Mapping):
            raise ArgumentTypeError(
                f"targets of sample {sample} must be a dict, got {type(record).__name__}. "
                "Put all annotations of an image into one dict: {'boxes': …, 'labels': …}."
            )


def _annotation_type(value: Any) -> str:
    """Return a name of the type of a value, such as "list of BoundingBoxes"; ``""`` for an empty value or ``None``."""
    if isinstance(value, Tensor):
        return type_name(value) or ("other values" if value.numel() else "")
    if _is_sequence(value):
        inner = _annotation_type(value[0]) if value else ""
        return inner and f"list of {inner}"
    if value is None:
        return ""
    return "dict" if type(value) is dict or batches.is_container(value) else "other values"


def _is_sequence(value: Any) -> bool:
    """Return whether a value is a list, a tuple or a similar sequence, and not a namedtuple or string."""
    if type(value) in (list, dict):  # the fast answer for the usual types
        return type(value) is list
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and not batches.is_namedtuple(value)
