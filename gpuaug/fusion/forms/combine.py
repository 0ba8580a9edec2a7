"""Combination of the images of a sample, as in a mosaic, and of their target dicts, before the passes of a pipeline.

A sample holds k images and k *target dicts*: the annotations of each image, such as ``{"boxes": …}``. The images of B samples
arrive as k *members*, that is, k batches of B images each, as ``collate_encoded`` returns them. Target dicts arrive as one list
of k dicts per sample. An op combines each *group* of consecutive images of a sample into one image, the group's *canvas*. A
*tile* says where on its canvas an image is written (``backends/tiles.py``).

In this file the N = k · B images are in the order of the samples: first all images of the first sample. The dicts have the same
order, and so have the boxes of all images in one tensor. So the dicts of a group are merged without sorting.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.errors import ArgumentError, ArgumentTypeError, shown
from gpuaug.core.packed_targets import packed_targets, unpack_targets
from gpuaug.core.ragged import Ragged, Shapes
from gpuaug.core.targets import BOXES, KEYPOINTS, MASKS, PackedTargets, TargetsLayout
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.backends.readers import as_bits, dtype_of, send, size_of
from gpuaug.fusion.backends.tiles import ABOVE, ABSENT, BELOW, Pixels, layouts_of, pixels_of
from gpuaug.fusion.clips import ClipLayout
from gpuaug.fusion.combine_ops import CombineOp, CopyPasteOp, Placement, combined_size, used_images
from gpuaug.fusion.forms.call import Call
from gpuaug.fusion.forms.containers import Container
from gpuaug.fusion.forms.data_keys import check_input, names_of
from gpuaug.fusion.forms.kinds import Masks, Points
from gpuaug.fusion.forms.merge import Merge, PlacedMasks, keys_per_box, kind_of
from gpuaug.fusion.ops.base import OpDraws, Size
from gpuaug.fusion.ops.torchvision.target_conversions import NO_CONVERSIONS
from gpuaug.fusion.options import BoxFormatName
from gpuaug.fusion.pixels import LARGEST
from gpuaug.fusion.program.program import ImageKey

LEAST_VISIBLE = 0.1
"""A box is valid only if at least this share of its area is on the canvas.

An object below pasted objects is valid only if at least this share of its pixels remains visible.
"""


class Combination:
    """Combination of the images and target dicts of one batch.

    Args:
        ops: Ops that combine images, in order. The canvases of an op are the images of the next one.
        inputs: Inputs of the call: images, and target dicts if there are any.
        data_keys: What each input holds, ``"input"`` for images or ``"targets"``. Default: images, then targets.
        boxes: Format of the boxes in target dicts, such as ``"xyxy"``.

    Raises:
        ArgumentTypeError, ArgumentError: If the inputs are not images and target dicts, or if a sample does not have as many of
            them as the ops combine.
    """

    def __init__(
        self, ops: Sequence[CombineOp], inputs: Sequence[Any], data_keys: Sequence[Any] | None, boxes: BoxFormatName
    ) -> None:
        self._ops, self._boxes = ops, boxes
        self.keys = names_of(("input", "targets")[: len(inputs)] if data_keys is None else data_keys)
        """Data keys of the inputs."""
        self.result_keys = None if self.keys == ["input"] else self.keys
        """Data keys of the results, to pass on to the pipeline; ``None`` if the result is only images."""
        names = ", ".join(op.name for op in ops)
        if len(inputs) != len(self.keys):
            raise ArgumentError(
                f"inputs must be one list of batches of images, and target dicts if there are any, for {names}, got "
                f"{len(inputs)} inputs for the data keys {self.keys}. Pass the images of all samples as one list of batches."
            )
        if sorted(self.keys) not in (["input"], ["input", "targets"]):
            raise ArgumentError(
                f"data_keys must be 'input' and 'targets' for {names}, got {self.keys}. Target "
                "dicts have room for masks, keypoints and labels."
            )
        values = dict(zip(self.keys, inputs, strict=True))
        images_per_sample = ops[0].groups * ops[0].count
        members = checked_members(values["input"], images_per_sample, names)
        self.size = combined_size(ops, size_of(members[0]))
        """Size of the batch of combined images."""
        self._pixels = pixels_of(members)
        self.device = members[0].device
        """Device of the images."""
        self.dtype = dtype_of(members[0])
        """dtype of the images."""
        self._are_packed = any(isinstance(value, PackedTargets) for value in inputs)  # decides the form of the results
        self._targets: PackedTargets | None = None
        self._cover: Tensor | None = None
        """Mask of the pixels of all canvases on which objects are pasted, flat uint8. ``_paste`` sets it."""
        if "targets" in values:
            self._targets = _packed(values["targets"], self.size.batch, images_per_sample, self.device)
            self._keys_per_box = keys_per_box(self._targets, images_per_sample)

    @property
    def plan_key(self) -> ImageKey | None:
        """Key under which ``Program.cached`` finds the plan for the combined images: (shape, device, has masks, has points).

        ``None`` if the combined images differ in size, because such plans are not cached.
        """
        height, width = self.size.shape[2:]
        if height is None or width is None:
            return None
        columns = self._targets.layout.packed if self._targets is not None else ()
        kinds = {kind_of(column.name, column.tensor_type) for column in columns}
        shape = torch.Size((self.size.batch, self.size.channels, height, width))
        return shape, self.device, MASKS in kinds, bool(kinds & {BOXES, KEYPOINTS})

    def restored(self, results: Any) -> Any:
        """Return the results of the passes, with the target dicts unpacked unless the inputs were packed."""
        return results if self._are_packed or "targets" not in self.keys else unpack_targets(results)

    @torch.no_grad()
    def run(self, draws: Sequence[OpDraws]) -> list[Any]:
        """Return the combined images and packed target dicts, in the order of the inputs.

        ``draws``: random parameters of each op, in order. The draws of later ops of the pipeline may follow.

        Raises:
            ArgumentError: If objects are pasted, and there are no target dicts with masks.
        """
        for op, op_draws, used in zip(self._ops, draws, used_images(self._ops, draws), strict=False):
            if self._targets is None and isinstance(op, CopyPasteOp):
                raise ArgumentError(
                    f"data_keys must hold 'targets' for {op.name}, which pastes objects by their masks, got {self.keys}. Pass "
                    "target dicts with masks beside the images."
                )
            placement = op.placement(op_draws, self._pixels.sizes, used)
            # Targets first: they need the sizes of the images before the op, which ``_combined_pixels`` replaces, and
            # ``_combined_pixels`` needs ``_cover``, which ``_paste`` sets.
            if self._targets is not None and len(placement.used):
                self._targets = self._combined_targets(self._targets, placement)
            self._pixels = self._combined_pixels(placement)
        results = {"input": self._images(), "targets": self._targets}
        return [results[key] for key in self.keys]

    def _combined_pixels(self, placement: Placement) -> Pixels:
        """Return the pixels of the canvases of an op."""
        op, draws, tiles, used, canvas_sizes = placement
        shapes = Shapes(canvas_sizes, self._pixels.channels, "chw")
        out = torch.empty(shapes.num_elements, dtype=self.dtype, device=self.device)
        # ``op.fill`` is in [0, 255], and ``fill`` in the range of the dtype, which is [0, 1] for floating dtypes.
        fill = op.fill / 255 * LARGEST.get(self.dtype, 1)
        fill = float(round(fill)) if self.dtype in LARGEST else fill
        if not op.overlays:
            dispatch.write_tiles(out, self._pixels, tiles.compress(used, 0), fill)
        else:
            # Two images per group: the first fills the canvas. If the op is applied, the second is written over it: blended by
            # ``weights``, or pasted where ``cover`` is not 0.
            weights = op.weights(draws)
            dispatch.write_tiles(out, self._pixels, tiles[::2].compress(used[::2], 0), fill)
            is_written = used[1::2]
            options: dict[str, Any] = {"cover": self._cover} if weights is None else {"weights": weights[is_written]}
            dispatch.write_tiles(out, self._pixels, tiles[1::2].compress(is_written, 0), fill, **options)
        return Pixels([out], layouts_of(shapes), shapes.channels)

    def _combined_targets(self, targets: PackedTargets, placement: Placement) -> PackedTargets:
        """Return the packed target dicts of the canvases of an op. ``targets``: of the N images before the op."""
        op, canvas_sizes = placement.op, placement.canvases
        sizes = self._pixels.sizes
        have_one_size = bool((canvas_sizes == canvas_sizes[:1]).all())
        if not have_one_size and self._boxes == "cxcywh_share":
            raise ArgumentError(
                f"boxes must be in pixels for {op.name} where images differ in size, got boxes='cxcywh_share'. Put a "
                "gpuaug.Mosaic before it, or convert boxes in the data set."
            )
        call = _ImagesCall(sizes, self.size, self.device, self._boxes)
        call.out = tuple(canvas_sizes[0].tolist()) if have_one_size else (_UNBOUNDED, _UNBOUNDED)
        container = Container("targets", targets, call)
        # Matrices map (x, y, 1) from image to canvas, in coordinates of pixel centres, in which the left edge of an image is at
        # -0.5: x on the canvas = left - 0.5 + (x + 0.5) · scale. In a matrix of 9 elements, 0 and 2 are for x, 4 and 5 for y.
        # In tiles and sizes, y comes before x. The first columns of a tile: top, left, height, width of the resized image.
        resized_rectangles = np.ascontiguousarray(placement.tiles[:, :4].T)
        scale = resized_rectangles[2:] / np.ascontiguousarray(sizes.T)
        matrices = np.zeros((len(sizes), 9), np.float32)
        matrices[:, 4], matrices[:, 0] = scale
        matrices[:, 5], matrices[:, 2] = resized_rectangles[:2] + scale / 2 - 0.5
        matrices[:, 8] = 1
        host_arrays = [array for target in container.targets for array in target.host_arrays]
        matrix, layouts, *arrays = send([matrices.reshape(-1, 3, 3), self._pixels.layouts[:, :3], *host_arrays], self.device)
        remaining_arrays = iter(arrays)
        masks: dict[Any, PlacedMasks] = {}
        boxes: list[Points] = []
        for slot in container.slots:  # a slot has the masks, boxes or keypoints of all dicts under one key
            target = slot.target
            target.device_arrays = [next(remaining_arrays) for _ in target.host_arrays]
            if isinstance(target, Masks):
                if 2 in map(len, slot.column.shapes):
                    raise ArgumentError(
                        f"{slot.path[-1]} must be (n, H, W), one mask per object, for {op.name}, got a mask (H, W). Leave "
                        "segmentation maps out, or combine them in the data set."
                    )
                masks[slot.path[-1]] = self._placed_masks(target, placement)
                # A placeholder without pixels: ``Merge.result`` replaces it by the placed masks.
                target.values = target.values.new_empty((len(target.host_arrays[0]), 1, 0, 0))
            elif target.clip:  # boxes; keypoints are not clipped
                boxes.append(target)
            else:
                target.transform(matrix, layouts, call.out, NO_CONVERSIONS)
        if isinstance(op, CopyPasteOp):
            self._paste(masks, boxes, placement, matrix, layouts)
            # ``_paste`` has mapped the boxes to the canvases, so the next lines only clip them.
            matrix = torch.eye(3, dtype=torch.float32, device=self.device).expand_as(matrix)
        for target in boxes:
            target.min_visible = 0.0 if op.size is None else LEAST_VISIBLE  # without a fixed size, canvases cut nothing off
            target.transform(matrix, layouts, call.out, NO_CONVERSIONS)
        # The container returns a list of dicts if it had to unpack them.
        result = container.output()
        packed = result if isinstance(result, PackedTargets) else packed_targets(result, self.device)
        return Merge(packed, placement, self._keys_per_box, self.device).result(masks)

    def _paste(
        self, masks: Mapping[Any, PlacedMasks], boxes: Sequence[Points], placement: Placement, matrix: Tensor, layouts: Tensor
    ) -> None:
        """Cut pasted objects out of the masks below them, set ``_cover``, and map boxes to the canvases.

        In groups to which the op is applied, each box becomes the rectangle around the visible pixels of its mask.

        Args:
            masks: Key → masks on the canvases, changed in place.
            boxes: Boxes of all images, changed in place.
            placement: Result of ``op.placement``.
            matrix: Matrices from image to canvas, (N, 3, 3).
            layouts: (N, 3) int64, offset, height and width of each image, on the device.

        Raises:
            ArgumentError: If there is not one column of masks.
        """
        op, draws = placement.op, placement.draws
        assert isinstance(op, CopyPasteOp)
        if len(masks) != 1:
            raise ArgumentError(
                f"targets must have masks, (n, H, W), for {op.name}, got {len(masks)} columns of masks. Return masks of all "
                "objects from the data set: {'boxes': …, 'labels': …, 'masks': …}."
            )
        ((owners, flat_masks),) = masks.values()
        # ``owners``: index of the image of each mask. It ascends, so searchsorted returns the first mask of the image.
        # ``object_indices``: index of each mask in its image.
        object_indices = np.arange(len(owners)) - np.searchsorted(owners, owners)
        groups = owners // op.count
        roles = np.where(owners % op.count == 0, BELOW, np.where(op.chosen(draws, groups, object_indices), ABOVE, ABSENT))
        self._cover, statistics = dispatch.paste_objects(as_bits(flat_masks), groups, roles, placement.canvases)
        applies = placement.used[1::2]
        all_owners = [owners, *(target.host_arrays[0] for target in boxes)]
        # Indices of the masks, and of the boxes, in groups to which the op is applied.
        mask_rows, *rows_of_boxes = send([np.flatnonzero(applies[images // op.count]) for images in all_owners], self.device)
        # Per mask: number of pixels before pasting, number after pasting, and extent of the pixels after pasting, ``edges``:
        # smallest row, smallest column, largest row, largest column.
        before, after, *edges = statistics[mask_rows].float().unbind(1)
        is_valid = (after > 0) & (after >= LEAST_VISIBLE * before)
        corners = torch.stack((edges[1], edges[0], edges[3] + 1, edges[2] + 1), 1)
        corners = torch.where(is_valid[:, None], corners, 0)
        # An image has one box per mask, in the same order (``keys_per_box``): ``corners`` has one row per index in ``rows``.
        for target, rows in zip(boxes, rows_of_boxes, strict=True):
            target.replace_corners(matrix, layouts, rows, corners, is_valid)

    def _placed_masks(self, masks: Masks, placement: Placement) -> PlacedMasks:
        """Return the masks of the images that are used, on their canvases."""
        owners, offsets_and_sizes = masks.host_arrays
        used = placement.used[owners]
        owners = owners[used]
        layouts = layouts_of(Shapes(offsets_and_sizes[:, 1:], 1, "chw"))[used]
        # Each mask is written like its image, but to a separate canvas, which the region of the tile fills. The
        # canvases lie one after the other in ``placed_pixels``. Columns of tiles: 4 to 7, region (top, left, height, width); 8
        # and 9, height and width of the canvas; 10, offset of the canvas; 11, index of the image.
        tiles = placement.tiles[owners]
        tiles[:, 4:6] = 0
        tiles[:, 6:8] = tiles[:, 8:10]
        areas = tiles[:, 8:10].prod(1)
        tiles[:, 10] = areas.cumsum() - areas
        tiles[:, 11] = np.arange(len(owners))
        placed_pixels = torch.empty(int(areas.sum()), dtype=masks.values.dtype, device=self.device)
        dispatch.write_tiles(as_bits(placed_pixels), Pixels([as_bits(masks.values)], layouts, 1), tiles, 0, nearest=True)
        return PlacedMasks(owners, placed_pixels)

    def _images(self) -> Tensor | Ragged:
        """Return the canvases as a batch."""
        (data,), sizes = self._pixels.tensors, self._pixels.sizes
        if not self.size.ragged and (sizes == sizes[:1]).all():
            return data.view(len(sizes), self._pixels.channels, *(sizes[0].tolist() if len(sizes) else self.size.shape[2:]))
        (image_layouts,) = send([self._pixels.layouts[:, :3]], self.device)
        return Ragged(data, image_layouts, Shapes(sizes.copy(), self._pixels.channels, "chw"))


_UNBOUNDED = 2**24
"""Height and width to which boxes are clipped if canvases differ in size: they clip nothing.

Only ops without a fixed canvas size have such canvases. They fit images into the canvas, so no box has to be clipped.
"""


def checked_members(images: Any, count: int, names: str) -> list[Tensor | Ragged]:
    """Return the images of a call as a list of k batches, one per image of a sample.

    Args:
        images: Images as the user passed them.
        count: Number k of images per sample that the modules combine.
        names: Names of the modules, for messages.

    Raises:
        ArgumentTypeError: If ``images`` is not a list of batches of images.
        ArgumentError: If it does not have ``count`` batches, or the batches differ in number of images, channels or type, or
            have no pixels.
    """
    advice = f"Return {{'image': [{', '.join(f'i{index}' for index in range(count))}], …}} from the data set."
    if not isinstance(images, list | tuple):
        raise ArgumentTypeError(
            f"images must be a list of {count} batches for {names}, one per image of a sample, got {shown(images)}. {advice}"
        )
    if len(images) != count:
        raise ArgumentError(f"images must be a list of {count} batches for {names}, got {len(images)} per sample. {advice}")
    first = images[0]
    for index, member in enumerate(images):
        if index and _differ_in_pixels_only(member, first):
            continue
        check_input("input", member)
        if not _is_batch(member):
            raise ArgumentError(
                f"images must be batches (B, C, H, W) or ragged images for {names}, got {shown(member)}. Leave {names} out for "
                "clips."
            )
        size = size_of(member)  # ragged images without pixels are an error
        if isinstance(member, Tensor) and len(member) and 0 in member.shape[2:]:
            raise ArgumentError(
                f"images must have pixels, got {size.height}x{size.width} for image {index} of sample 0. Leave it out of the "
                "dataset."
            )
        member_type = f"{size.batch} images of {size.channels} channels, {dtype_of(member)} on {member.device}"
        if index == 0:
            first_type = member_type
        elif member_type != first_type:
            raise ArgumentError(
                f"images of a sample must have one type, got {first_type}, and {member_type} at index {index}. Convert them in "
                "the data set."
            )
    return [member if type(member) in (Ragged, Tensor) else member.as_subclass(Tensor) for member in images]


def _differ_in_pixels_only(images: Any, others: Any) -> bool:
    """Return whether two batches are tensors of one class, shape, dtype and device, so that both are valid or neither is."""
    return (
        type(images) is type(others)
        and isinstance(images, Tensor)
        and (images.shape, images.dtype, images.device) == (others.shape, others.dtype, others.device)
        and images.requires_grad == others.requires_grad
    )


def first_images(inputs: Sequence[Any], data_keys: Sequence[Any] | None) -> Sequence[Any]:
    """Return the inputs with only the first image of each sample, and its target dict. Other inputs are returned unchanged.

    Args:
        inputs: Inputs of a pipeline that does not combine images.
        data_keys: Data keys of the inputs. Default: the first input is images, the others are targets.
    """
    if not any(isinstance(value, list | tuple) and _are_batches(value) for value in inputs):
        return inputs
    keys = ["input", *("targets" for _ in inputs[1:])] if data_keys is None else names_of(data_keys)
    values = list(inputs)
    for index, (key, value) in enumerate(zip(keys, inputs, strict=False)):
        if key == "input" and _are_batches(value):
            values[index] = value[0]
        elif key in ("targets", "tv_tensors"):
            lists = value.unpacked() if isinstance(value, PackedTargets) else value
            is_nested = isinstance(lists, list | tuple) and all(_are_dicts(dicts) and dicts for dicts in lists)
            values[index] = [dicts[0] for dicts in lists] if is_nested else value
    return values


def _are_dicts(dicts: Any) -> bool:
    """Return whether ``dicts`` is a list of dicts."""
    return isinstance(dicts, list | tuple) and all(issubclass(cls, Mapping) for cls in set(map(type, dicts)))


def _are_batches(images: Any) -> bool:
    """Return whether ``images`` is a list of batches of images."""
    return isinstance(images, list | tuple) and len(images) > 0 and all(map(_is_batch, images))


def _is_batch(images: Any) -> bool:
    """Return whether ``images`` is a batch of images, not of clips."""
    return not images.shapes.frames if isinstance(images, Ragged) else isinstance(images, Tensor) and images.ndim == 4


def _packed(targets: Any, batch: int, count: int, device: torch.device) -> PackedTargets:
    """Return the target dicts of all images as one packed list, in the order of the samples.

    Args:
        targets: One list of ``count`` dicts per sample, or a ``PackedTargets`` of such lists.
        batch: Number of samples.
        count: Number of images per sample.
        device: Device of the images. Tensors on another device are not packed.

    Raises:
        ArgumentTypeError: If an element of ``targets`` is not a list of dicts.
        ArgumentError: If ``targets`` does not have one list of ``count`` dicts per sample.
    """
    if isinstance(targets, PackedTargets):
        layout = targets.layout
        if layout.groups == [count] * batch:
            layout = TargetsLayout(list, layout.records, layout.packed, keys=layout.keys)
            return PackedTargets(targets.flat, targets.others, layout)
        targets = targets.unpacked()
    if not isinstance(targets, list | tuple) or len(targets) != batch:
        raise ArgumentError(
            f"targets must be one list of {count} dicts for each of the {batch} samples, got {shown(targets)}. Return "
            "{'target': [t0, …], …} from the data set, with one dict per image."
        )
    are_usual = {list, tuple}.issuperset(map(type, targets)) and {count}.issuperset(map(len, targets))
    records = list(chain.from_iterable(targets)) if are_usual else []
    if set(map(type, records)) != {dict}:
        _check_dicts(targets, count)
        records = [dict(record) for dicts in targets for record in dicts]
    return packed_targets(records, device)


def _check_dicts(targets: Sequence[Any], count: int) -> None:
    """Raise an error unless each sample has a list of ``count`` dicts."""
    for sample, dicts in enumerate(targets):
        if not _are_dicts(dicts):
            raise ArgumentTypeError(
                f"targets of sample {sample} must be a list of {count} dicts, one per image, got {shown(dicts)}. Return "
                "one list of dicts per sample from the data set."
            )
        if len(dicts) != count:
            raise ArgumentError(
                f"targets of sample {sample} must be {count} dicts, one per image, got {len(dicts)}. Return as many dicts as "
                "images from the data set."
            )


class _ImagesCall(Call):
    """``Call`` for a ``Container``: has the sizes of the images, and no images. ``combined``: size of the combined batch."""

    def __init__(self, sizes: NDArray[np.int64], combined: Size, device: torch.device, boxes: BoxFormatName) -> None:
        self.boxes = boxes
        self.conversions = NO_CONVERSIONS
        self.clip_layout = ClipLayout()
        self.frames = 0
        self.size = Size(len(sizes), combined.channels, sizes[:, 0], sizes[:, 1])
        self.device = device
        self._images_per_sample = len(sizes) // combined.batch

    def image_name(self, index: int, *, per_frame: bool) -> str:
        """Return the name of an image for messages, such as "image 2 of sample 3"."""
        sample, image = divmod(index, self._images_per_sample)
        return f"image {image} of sample {sample}"
