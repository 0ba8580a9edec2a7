"""Lowering of torchvision's v2 transforms to ops.

A transform that is not lowered is a *fallback module*: torchvision runs it, image by image, at its position in the pipeline. A
subclass that overrides no method of its base is lowered as its base.

If the images of a pipeline are integers, the transforms before a *conversion*, such as ``ToDtype(torch.float32, scale=True)``,
have integers as input, and the transforms after the conversion have floats as input. If the images are floats, all transforms
have floats as input. Fills and thresholds have the units of the input of their transform. A fused pipeline computes in [0, 1].
After a conversion without ``scale``, it multiplies by 255 before the first op that needs values in [0, 255].

A container with a random choice makes one draw per sample. Each op in it has a *gate*: the outcomes of the draw for which the
op runs. *Targets* are annotations that are transformed together with the images: masks, boxes, keypoints, labels. A *mix*
blends images of a batch.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import nn
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

from gpuaug.core.errors import ArgumentError, ArgumentTypeError, GpuAugError
from gpuaug.core.torchvision_types import TypeChange, class_of, is_unmodified_sequential, nearest_class, torchvision_class
from gpuaug.fusion.combine_ops import CombineOp, misplaced_error
from gpuaug.fusion.lower import by_name, choices
from gpuaug.fusion.lower.conversions import (
    CONVERSIONS,
    PRESETS,
    conversion_of,
    converts_to_floats,
    expanded,
    for_videos,
    torchvision_equivalent,
)
from gpuaug.fusion.lower.image_types import ImageTypes
from gpuaug.fusion.lower.refusals import ATTRIBUTE_ERRORS, attributes_reason, refuse_transform, v2_of
from gpuaug.fusion.lower.tree import Group, ImplicitTransform, Leaf, Tree, leaves, lowered
from gpuaug.fusion.ops.base import Op
from gpuaug.fusion.ops.fallback import EagerTorchvision
from gpuaug.fusion.ops.filters import BlurOp
from gpuaug.fusion.ops.geometry import GatherOp, IndexOp, ResampleOp, WarpOp
from gpuaug.fusion.ops.mix import MixOp
from gpuaug.fusion.ops.sampler import Draw, Gate
from gpuaug.fusion.ops.torchvision import color, crop, elastic, filters, iou_crop, jpeg, positional, resize, warp
from gpuaug.fusion.ops.torchvision import mix as mixes
from gpuaug.fusion.ops.torchvision.base import TorchvisionOp, Units
from gpuaug.fusion.ops.torchvision.per_box import check_labels_getter
from gpuaug.fusion.ops.torchvision.target_conversions import TargetConversions
from gpuaug.fusion.pixels import LARGEST
from gpuaug.fusion.policies import torchvision as policies
from gpuaug.fusion.policies.one_mix import OneMix

LOWERED = lowered(crop, iou_crop, resize, warp, elastic, color, filters, jpeg, positional, policies)
"""Class of torchvision → class of its op, for all classes that are lowered to an op, except mixes."""

MIXES = lowered(mixes)
"""Class of torchvision → class of its op, for ``v2.MixUp`` and ``v2.CutMix``."""

IDENTITIES = (v2.Identity, v2.ToImage, v2.PILToTensor)
"""Transforms that do not change the pixels of a tensor."""

TARGET_TRANSFORMS = (v2.ToPureTensor, v2.ClampBoundingBoxes, v2.ConvertBoundingBoxFormat, v2.SanitizeBoundingBoxes)
"""Transforms of targets only, which are applied at the end of the pipeline."""

RANGE_CHANGING = (v2.Lambda, v2.LinearTransformation, v2.Normalize)
"""Transforms whose output may lie outside [0, 1], for input in [0, 1]."""

RANDOM_CONTAINERS = (v2.RandomApply, v2.RandomChoice, v2.RandomOrder)
"""Containers whose transforms run for some samples only, or in a random order per sample."""

LOWERED_CLASSES: frozenset[type] = frozenset(
    {
        *LOWERED,
        *IDENTITIES,
        *TARGET_TRANSFORMS,
        *CONVERSIONS,
        *RANDOM_CONTAINERS,
        *MIXES,
        v2.Compose,
        v1.ConvertImageDtype,
        *PRESETS,
    }
)
"""Classes that this file can lower: to ops, to trees of ops, to no op (``ImplicitTransform``), or to equivalent transforms."""


class TorchvisionLowering:
    """Lower the torchvision transforms of one pipeline, in order.

    Args:
        lower: Function of (name, module) that lowers a member of a container, of any library.
        types: Dtype and range of the images before the next transform, updated by each transform.
    """

    def __init__(self, lower: Callable[[str, Any], Tree], types: ImageTypes) -> None:
        self._lower, self._types = lower, types
        self._unscaled_name = ""
        """Name of the last conversion without ``scale``."""
        self._sized_by_choice: set[Op] = set()
        """Ops that change the image size, but do not draw it, in a container that runs them for some samples only.

        ``choices.prepare_sizes`` adds them.
        """

    @property
    def units(self) -> Units:
        """Dtype whose range of values the settings of the next transform refer to, such as uint8 for a fill in [0, 255]."""
        return self._types.dtype if self._types.are_integers else torch.float32

    def tree(self, name: str, transform: Any) -> Tree:
        """Lower a transform or container.

        Raises:
            ArgumentTypeError: If the transform, or its combination with others in a container, is not supported.
            ArgumentError: If a setting or the position of the transform is not supported.
        """
        if class_of(transform, LOWERED_CLASSES) in TARGET_TRANSFORMS:
            if class_of(transform, (v2.ToPureTensor,)):
                self._types.type_change = TypeChange(to_pure=True)
            return _target_transform(name or type(transform).__name__, transform)
        # gpuaug's transforms that combine images, such as Mosaic, name their op in ``op_class``.
        if (op_class := getattr(transform, "op_class", None)) is not None and issubclass(op_class, CombineOp):
            name = name or type(transform).__name__
            return Leaf(name, op_class(name, transform))
        mix = _mix(name or type(transform).__name__, transform)
        if mix is not None:
            if any(isinstance(op, mixes.MixUp) for op in mix.ops):  # torchvision's MixUp takes floats only
                self._types.require_floats(mix.name)
            return self._after_multiplication(Leaf(mix.name, mix))
        # Transforms of v1 and of other libraries are replaced by equal transforms of v2.
        transform = v2_of(
            torchvision_equivalent(transform), (*LOWERED, *IDENTITIES, *CONVERSIONS, *RANDOM_CONTAINERS, v2.Compose)
        )
        class_ = class_of(transform, LOWERED_CLASSES)
        if class_ is v2.Compose:
            return Group(name, tuple(self._member(*member) for member in choices.named_transforms(transform.transforms)))
        name = name or type(transform).__name__
        if class_ is v2.ToImage:
            self._types.type_change = self._types.type_change._replace(to_image=True)
        if class_ in IDENTITIES:
            return ImplicitTransform(name)
        if class_ in CONVERSIONS:
            return self._conversion_tree(name, transform)
        if class_ in RANDOM_CONTAINERS or by_name.is_a(transform, "lerobot.RandomSubsetApply"):
            before = self.multiplication()
            container = self._random_container(name, transform)
            return Group("", (*before, container)) if before else container
        return self._after_multiplication(self._leaf(name, transform))

    def multiplication(self) -> tuple[Tree, ...]:
        """Return (leaf of the multiplication by ``delayed_factor``,), and set the factor to 1; () if the factor is 1."""
        factor, self._types.delayed_factor = self._types.delayed_factor, 1
        name = self._unscaled_name
        return () if factor == 1 else (Leaf(name, color.Multiplication(name, factor)),)

    def _after_multiplication(self, leaf: Leaf) -> Tree:
        """Return ``leaf``, after the delayed multiplication if there is one. Linear ops with fill 0 may run before it."""
        parts = leaf.op.plan_ops if isinstance(leaf.op, Op) else ()  # of a policy, all ops that run for it
        is_linear = [isinstance(part, GatherOp | BlurOp) and not np.any(getattr(part, "fill", 0)) for part in parts]
        before = () if parts and all(is_linear) else self.multiplication()
        return Group("", (*before, leaf)) if before else leaf

    def _member(self, name: str, transform: Any) -> Tree:
        """Lower a member of a container of torchvision. It may be any callable, because torchvision calls it once per image."""
        is_sequence_or_kornia = is_unmodified_sequential(transform) or type(transform).__module__.startswith("kornia.")
        if is_sequence_or_kornia or torchvision_class(transform) is not None or by_name.recognized_class(transform) is not None:
            return self._lower(name, transform)
        equivalent = by_name.torchvision_equivalent(transform)
        if equivalent is not transform:
            return self.tree(name, equivalent)
        refuse_transform(transform)
        return self._after_multiplication(self._fallback(name, transform, "its operations are unknown", keeps_range=False))

    def _fallback(self, name: str, transform: Any, reason: str, lowered: Op | None = None, *, keeps_range: bool) -> Leaf:
        """Return a leaf with a fallback module, which is called on images of the dtype that torchvision would pass to it.

        Args:
            name: Name of the transform.
            transform: Transform of the user.
            reason: Reason why the transform is not lowered.
            lowered: Op that computes the output size and checks settings per channel; ``None`` if neither is needed.
            keeps_range: Whether the transform is certain to keep values in [0, 1].
        """
        dtype, type_change = self._types.dtype, self._types.type_change
        index = self._types.fall_back(keeps_range=keeps_range)
        out_dtype = self._types.dtype
        op = EagerTorchvision(name, transform, reason, lowered, dtype=dtype, out_dtype=out_dtype, index=index)
        op.type_change = type_change
        return Leaf(name, op)

    def _leaf(self, name: str, transform: Any) -> Leaf:
        """Return a leaf with the op or fallback module of a transform that is not a container.

        Raises:
            ArgumentTypeError: If the transform is not supported, or draws a size per image and cannot be fused.
            ArgumentError: If a normalization is for another range than the images have.
        """
        refuse_transform(transform)
        base: Any = nearest_class(transform, LOWERED_CLASSES)  # class by which the transform is lowered
        if base is None:
            base = by_name.recognized_class(transform) or torchvision_class(transform)
        op, reason = self._op(name, transform, base)
        type_difference = "a function" if base is None else by_name.difference_reason(transform, base)
        if type_difference is not None:
            # The difference from ``base`` is the reason only if an unmodified instance of ``base`` would be lowered.
            is_lowered_class = base is not None and (
                by_name.qualified_name(base) or base.__name__ in {class_.__name__ for class_ in LOWERED_CLASSES}
            )
            reason = type_difference if is_lowered_class else "no lowering for this type"
        # If the op could not be created, its class has the attributes ``draws_size`` and ``takes_any_range``, too.
        op_or_class = LOWERED.get(base) if op is None else op
        if reason is not None and op_or_class is not None and op_or_class.draws_size:
            raise ArgumentTypeError(
                f"{name} must be a transform that gpuaug.fuse lowers, as it draws a size per image, got {reason}. "
                "Keep it in the dataset, and fuse the rest with ragged=True."
            )
        takes_any_range = op_or_class is None or op_or_class.takes_any_range
        if type_difference is None and not takes_any_range:
            self._types.require_unit_range(name)
        if reason is not None:
            keeps_range = type_difference is None and base not in RANGE_CHANGING
            # A fallback module keeps the op if the op changes the image size, or has settings with one value per channel.
            has_channel_settings = op is not None and type_difference is None and op.per_channel(choices.PROBE_SIZE.channels)
            lowered = op if has_channel_settings else choices.sizing_op(op)
            return self._fallback(name, transform, reason, lowered, keeps_range=keeps_range)
        assert op is not None
        op.type_change = self._types.type_change
        if isinstance(op, ResampleOp):
            op.clamps = self._types.dtype in (torch.uint8, torch.uint16)
        for part in op.ops:
            if isinstance(part, IndexOp | WarpOp) or (isinstance(part, elastic.Elastic) and part.fill is not None):
                self._types.check_fill(name, part.fill)
            elif isinstance(part, positional.Erasing):
                self._types.check_fill(name, part.value, "value")
        if isinstance(op, color.Normalize):
            op.multiply_input(self._types.delayed_factor)  # in place of a separate multiplication
            self._types.delayed_factor = 1
            self._types.normalize(op)
        self._types.at_most_one = self._types.at_most_one and base not in RANGE_CHANGING
        return Leaf(name, op)

    def _op(self, name: str, transform: Any, base: Any) -> tuple[TorchvisionOp | None, str | None]:
        """Return (op of a transform, reason why the transform is not lowered).

        The op is ``None`` if the class has no op, or if the op cannot be created. The reason is ``None`` if it is lowered.
        ``base``: class by which the transform is lowered, a class of torchvision or one that ``by_name`` recognizes.
        """
        op_class = LOWERED.get(base) or by_name.LOWERED.get(by_name.qualified_name(base))
        if op_class is None:
            return None, "no lowering for this type"
        try:
            op = op_class(name, for_videos(transform) if self._types.is_video else transform, self.units)
            op.image_dtype = self._types.dtype
            return op, op.unsupported()
        except GpuAugError:
            raise
        except ATTRIBUTE_ERRORS as error:
            return None, attributes_reason(transform, base, error)

    def _conversion_tree(self, name: str, transform: Any) -> Tree:
        """Lower a conversion: to no op, because passes convert images when they read them, or, to uint8, to a fallback module.

        Raises:
            ArgumentError: If images are converted to another dtype than float32, uint8 and the dtype that they have.
        """
        dtype, scale = conversion_of(for_videos(transform) if self._types.is_video else transform)
        dtypes = transform.dtype if isinstance(transform, v2.ToDtype) else None
        target_conversions = TargetConversions(masks=dtypes.get(tv_tensors.Mask)) if isinstance(dtypes, dict) else None
        conversion = ImplicitTransform(name, (("to_dtype", {"dtype": dtype, "scale": scale}),), target_conversions)
        if dtype is None:  # images are not converted
            return ImplicitTransform(name, target_conversions=target_conversions)
        if dtype is torch.float32:
            self._types.to_floats(scale=scale)
            self._unscaled_name = name if self._types.delayed_factor != 1 else self._unscaled_name
            return conversion
        if dtype in LARGEST and dtype == self._types.dtype:
            return conversion
        if dtype is torch.uint8:
            reason = "it rounds images to bytes"
            if scale:
                self._types.require_unit_range(name)
            before = self.multiplication()
            leaf = self._fallback(name, v2.ToDtype(dtype, scale=scale), reason, keeps_range=True)
            return Group("", (*before, leaf, ImplicitTransform(name, target_conversions=target_conversions)))
        raise ArgumentError(
            f"{name} must convert images to float32 for gpuaug.fuse, got {dtype}. Convert to torch.float32, and pass the type "
            "of the result to gpuaug.fuse(…, dtype=…)."
        )

    def _random_container(self, name: str, container: Any) -> Tree:
        """Lower a container with a random choice: to ops with gates, or to a fallback module for the whole container.

        Raises:
            ArgumentTypeError: If the container has a member that cannot run in it.
            ArgumentError: If a member converts images or targets.
        """
        members = list(choices.named_transforms(container.transforms))
        transforms = list(expanded([member for _, member in members]))
        if any(converts_to_floats(transform) or class_of(transform, TARGET_TRANSFORMS) for transform in transforms):
            raise ArgumentError(
                f"{name} must hold transforms that do not convert images, got a conversion. Put the conversion after {name}."
            )
        crops = next((transform for transform in transforms if class_of(transform, (v2.FiveCrop, v2.TenCrop))), None)
        if crops is not None:
            raise ArgumentTypeError(
                f"{name} must hold transforms that make one image of one, got {type(crops).__name__}. Put it before {name}."
            )
        dtype, type_change = self._types.dtype, self._types.type_change
        # ``reason``: why the container cannot have gates. ``problem``: why its ops cannot run on images of different sizes.
        reason = choices.unsupported_draw(container)
        shared_resize = None if reason else choices.common_resize(container)
        if shared_resize is not None:
            # All members end in the same resize. It is lowered once, after the container, for all samples.
            members = list(map(choices.without_last_transform, members))
        trees = [self._member(*member) for member in members] if reason else self._gated(name, container, members)
        all_leaves = [leaf for tree in trees for leaf in leaves(tree)]
        final_resize = None if shared_resize is None else self._leaf(*shared_resize)
        combining_name = next((leaf.name for leaf in all_leaves if isinstance(leaf.op, CombineOp)), None)
        if combining_name is not None:
            raise misplaced_error(combining_name, f"in {name}")
        other_module = next((leaf.name for leaf in all_leaves if leaf.op.package != "torchvision"), None)
        if other_module is not None:
            raise ArgumentTypeError(
                f"{name} must hold torchvision's transforms, got {other_module}. Replace it with a transform of torchvision."
            )
        sizing_ops = [op for leaf in all_leaves if (op := choices.sizing_op(leaf.op)) is not None and not op.draws_size]
        problem = choices.prepare_sizes(all_leaves, final_resize, self._sized_by_choice) if not reason and sizing_ops else None
        if not reason and problem is None:
            return Group(name, (*trees, *([] if final_resize is None else [final_resize])))
        ops = [leaf.op for leaf in all_leaves if isinstance(leaf.op, Op) and leaf.op not in self._sized_by_choice]
        drawing_name = next((op.name for op in ops if op.draws_size), None)
        if drawing_name is not None:
            raise ArgumentTypeError(
                f"{name} must hold transforms that gpuaug.fuse fuses together, as {drawing_name} draws a size per image, got "
                f"{problem or reason}. Keep {name} in the dataset, and fuse the rest with ragged=True."
            )
        if not reason:
            reason = f"{sizing_ops[0].name} in it may change the size of some images{'; ' if problem else ''}{problem}"
        # The container is one fallback module: the types before it are the types before its first member.
        self._types.dtype, self._types.type_change = dtype, type_change
        # No op or one, the optional argument ``lowered`` of ``_fallback``.
        lowered = sizing_ops[-1:] if final_resize is None else [choices.sizing_op(final_resize.op)]
        leaf = self._fallback(name, container, reason, *lowered, keeps_range=False)
        assert isinstance(leaf.op, EagerTorchvision)
        leaf.op.members_move_nothing = final_resize is None and all(choices.moves_nothing(member.op) for member in all_leaves)
        return leaf

    def _gated(self, name: str, container: Any, members: Sequence[tuple[str, Any]]) -> list[Tree]:
        """Lower the members of a container, and give each op a gate on the container's draw.

        Args:
            name: Name of the container.
            container: Container with a random choice, for which ``choices.unsupported_draw`` returns ``None``.
            members: (name, transform) of each member; ``None`` as transform if there is nothing to lower.
        """
        outcomes, turns = choices.outcomes(name, container)
        draw = Draw(tuple(accumulate(outcomes.values()))[:-1])  # boundaries between the bins of [0, 1), one bin per outcome
        trees = []
        for turn in turns:  # with a random order one per position; a member then has an op in each turn
            for index, member in enumerate(members):
                runs = np.array([index in outcome[turn] for outcome in outcomes])
                if runs.any() and member[1] is not None:
                    trees.append(self._member(*member))
                    for leaf in leaves(trees[-1]):
                        leaf.op.gates = (Gate(draw, runs), *leaf.op.gates)
        return trees


def _target_transform(name: str, transform: Any) -> ImplicitTransform:
    """Return the node of a transform in ``TARGET_TRANSFORMS``, with the conversions of targets that it stands for.

    Raises:
        ArgumentError: If the transform converts to rotated boxes.
    """
    class_ = class_of(transform, TARGET_TRANSFORMS)
    if class_ is v2.ToPureTensor:
        return ImplicitTransform(name, target_conversions=TargetConversions(is_pure=True))
    if class_ is v2.ConvertBoundingBoxFormat:
        box_format = str(getattr(transform.format, "value", transform.format))
        if box_format.lower() not in ("xyxy", "xywh", "cxcywh"):
            raise ArgumentError(
                f"format of {name} must be XYXY, XYWH or CXCYWH, got {box_format}. Rotated boxes are not supported: remove it."
            )
        return ImplicitTransform(name, target_conversions=TargetConversions(boxes=box_format.lower()), processes_boxes=True)
    if class_ is v2.ClampBoundingBoxes:  # needs no conversion, because all boxes are clamped anyway
        return ImplicitTransform(name, processes_boxes=True)
    check_labels_getter(name, transform.labels_getter)
    target_conversions = TargetConversions(min_size=float(transform.min_size), min_area=float(transform.min_area))
    return ImplicitTransform(name, target_conversions=target_conversions, follows_moves=True, processes_boxes=True)


class _PickedMix(mixes.TorchvisionMix, OneMix):
    """Op of a ``RandomChoice`` of mixes, which picks one mix per batch."""


def _mix(name: str, transform: Any) -> MixOp | None:
    """Return the op of a mix, or of a random container of mixes, which runs at most one mix per batch; ``None`` without mixes.

    Raises:
        ArgumentTypeError: If a container picks from mixes and other transforms, or may pick several mixes.
    """
    class_: Any = class_of(transform, LOWERED_CLASSES)
    if class_ in MIXES:
        return MIXES[class_](name, transform)  # type: ignore[no-any-return]
    is_choice = class_ in RANDOM_CONTAINERS or by_name.is_a(transform, "lerobot.RandomSubsetApply")
    inner = (
        [(member_name, _mix(member_name, member)) for member_name, member in choices.named_transforms(transform.transforms)]
        if is_choice
        else []
    )
    inner_mixes = [mix for _, mix in inner if mix is not None]
    if not inner_mixes:
        return None
    if len(inner_mixes) < len(inner) or not (class_ is v2.RandomChoice or len(inner_mixes) == 1):
        raise ArgumentTypeError(
            f"{name} must hold a single mix, or be a RandomChoice of only mixes, got {', '.join(dict(inner))}. "
            "It then draws once per batch: move the other transforms out of it."
        )
    if class_ is v2.RandomChoice:
        modules = nn.ModuleList(mix.module for mix in inner_mixes)
        return _PickedMix(name, modules, inner_mixes, "batch", choices.probabilities(name, transform))
    (mix,) = inner_mixes
    if class_ is v2.RandomApply:
        _scale_probability(mix, float(transform.p))
    mix.name = name
    return mix


def _scale_probability(mix: MixOp, p: float) -> None:
    """Multiply the probability per batch of a mix, or of all mixes that may be picked, by ``p``."""
    mix.p_batch *= p
    for inner_mix in mix.mixes if isinstance(mix, OneMix) else ():
        _scale_probability(inner_mix, p)
