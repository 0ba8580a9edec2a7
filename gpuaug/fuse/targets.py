"""What is augmented together: images, and the masks, boxes, keypoints and labels that follow them."""

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from kornia.constants import DataKey, Resample
from kornia.geometry.boxes import Boxes
from torch import Tensor

from gpuaug.errors import ArgumentError, ArgumentTypeError, DeviceError
from gpuaug.fuse import executors
from gpuaug.fuse.boxes import FORMS, from_vertices, move, vertices
from gpuaug.fuse.eager import EagerOp
from gpuaug.fuse.gather import Gather
from gpuaug.fuse.geometry import GatherOp
from gpuaug.fuse.labels import SoftLabels
from gpuaug.fuse.mixes import MixOp
from gpuaug.fuse.ops import Array, Drawn, Op, Size
from gpuaug.fuse.plan import Plan
from gpuaug.fuse.sources import size_of
from gpuaug.ragged import Ragged

_NAMES: dict[Any, str] = {DataKey.IMAGE: "input", DataKey.LABEL: "class"}


class Targets:
    """The inputs of one call, on their way through the passes.

    Args:
        inputs: As the user passed them.
        keys: What each is, in Kornia's words.
        extra_args: Of the user's container: how masks are to be resampled.
    """

    def __init__(self, inputs: Sequence[Any], keys: Sequence[Any], extra_args: Any) -> None:
        self.keys = [_name(key) for key in keys]
        if len(inputs) != len(self.keys):
            raise ArgumentError(
                f"data_keys must name each input, got {len(self.keys)} for {len(inputs)} inputs. "
                f"Pass as many as there are: data_keys={self.keys}."
            )
        if "input" not in self.keys:
            raise ArgumentError(f"data_keys must contain 'input', got {self.keys}. Pass the images along.")
        for key, value in zip(self.keys, inputs, strict=True):
            _check(key, value)
        self.has_masks = "mask" in self.keys
        """Whether masks follow."""
        self.has_points = any(key in FORMS for key in self.keys)
        """Whether boxes or keypoints follow."""
        images = inputs[self.keys.index("input")]
        self._unbatched = isinstance(images, Tensor) and images.ndim == 3
        images = images[None] if self._unbatched else images
        self.device: torch.device = images.device
        self.size = size_of(images)
        self.shape = self.size.shape
        self._dtypes = [getattr(value, "dtype", torch.float32) for value in inputs]
        self._missing = [self._missing_axis(key, value) for key, value in zip(self.keys, inputs, strict=True)]
        self._soft: SoftLabels | None = None
        self._softened_by: MixOp | None = None
        self.values: list[Any] = []
        for key, value, axis in zip(self.keys, inputs, self._missing, strict=True):
            whole = value if axis is None else value.unsqueeze(axis)
            self.values.append(vertices(whole, key) if key in FORMS else whole)
            self._check_fit(key, self.values[-1], tuple(getattr(value, "shape", ())))
        if (
            self.has_masks
            and extra_args
            and extra_args.get(DataKey.MASK, {}).get("resample", Resample.NEAREST) != Resample.NEAREST
        ):
            raise ArgumentError("extra_args must resample masks to the nearest, got another way. Leave extra_args out.")

    def _missing_axis(self, key: str, value: Any) -> int | None:
        # As in Kornia, a single image is a batch of one, and a mask without channels has one.
        if isinstance(value, Ragged):
            return None
        if key in ("input", "mask") and value.ndim == 3:
            return 0 if key == "input" or self._unbatched else 1
        if key in FORMS and value.ndim == 1 + len(FORMS[key]) and self.size.batch == 1:
            return 0
        return None

    def _check_fit(self, key: str, value: Any, given: tuple[int, ...]) -> None:
        if key == "class":
            return
        if value.device != self.device:
            raise DeviceError(f"{key} must be on {self.device}, where the images are, got {value.device}. Move it there first.")
        if len(value) != self.size.batch:
            raise ArgumentError(
                f"{key} must hold one entry for each of the {self.size.batch} images, got {given}. Pass a batch of them."
            )
        wanted: tuple[int | None, ...] = ()
        if key == "mask":
            wanted = (self.shape[0], value.shape[1], *self.shape[2:])
        if wanted and tuple(value.shape) != wanted:
            raise ArgumentError(
                f"{key} must be of the images' size {self.shape}, got {tuple(value.shape)}. Resize it to theirs first."
            )

    def check_mix(self, op: MixOp) -> None:
        """Refuse what cannot be mixed before anything is run.

        Raises:
            ArgumentError: If something else than images and labels goes along.
            ArgumentTypeError: If labels are no tensor.
            DeviceError: If they are not where the images are.
        """
        others = [key for key in self.keys if key not in op.targets]
        if others:
            raise ArgumentError(
                f"data_keys must be among {', '.join(op.targets)} where {op.name} mixes images, got {', '.join(others)}. "
                "Mix in a stage of its own, without them."
            )
        self._check_labels()

    def soften(self, soft: SoftLabels, mixes: Sequence[MixOp]) -> None:
        """Have labels leave as shares of the classes: at once, or where the pipeline mixes first.

        Raises:
            ArgumentError: If labels are neither indices nor shares.
            ArgumentTypeError: If they are no tensor.
            DeviceError: If they are not where the images are.
        """
        self._check_labels()
        for index, key in enumerate(self.keys):
            if key == "class":
                soft.check(self.values[index], self.size.batch)
                if not mixes:
                    self.values[index] = executors.run_labels(soft, self.values[index], None)
        self._soft, self._softened_by = soft, mixes[0] if mixes else None

    def _check_labels(self) -> None:
        for key, value in zip(self.keys, self.values, strict=True):
            if key == "class" and not isinstance(value, Tensor):
                raise ArgumentTypeError(f"class must be a tensor, got {type(value).__name__}. Pass one index for each image.")
            if key == "class" and value.device != self.device:
                raise DeviceError(
                    f"class must be on {self.device}, where the images are, got {value.device}. Move it there first."
                )

    def copy(self) -> "Targets":
        """The same inputs, to be taken another way."""
        made = copy.copy(self)
        made.values = list(self.values)
        return made

    def repeat(self, views: int) -> None:
        """Take all but the images, which a plan reads anew for each view, so often: views lie behind one another."""
        for index, key in enumerate(self.keys if views > 1 else ()):
            value = self.values[index]
            if key != "input":
                repeats = value.repeat(views, *([1] * (value.ndim - 1))) if isinstance(value, Tensor) else [*value] * views
                self.values[index] = repeats

    def join(self, views: Sequence["Targets"]) -> None:
        """Put what became of each view behind one another."""
        for index, value in enumerate(views[0].values):
            each = [view.values[index] for view in views]
            self.values[index] = torch.cat(each) if isinstance(value, Tensor) else [one for view in each for one in view]

    def _mixed(self, labels: Tensor, op: MixOp, rows: Tensor) -> Tensor:
        if self._soft is None:
            return op.labels(labels, rows)
        # What comes to a later mix is shares already, and smooth.
        soft = self._soft if op is self._softened_by else replace(self._soft, smoothing=0.0)
        return executors.run_labels(soft, labels, rows)

    def run_plan(
        self,
        plan: Plan,
        table: Tensor,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        """Take everything through the passes of a plan."""
        for index, key in enumerate(self.keys):
            value = self.values[index]
            if key == "input":
                self.values[index] = executors.run(plan, value, table, dtype, memory_format)
            elif key == "mask":
                for step in plan.passes:
                    value = executors.run_mask(step, value, table)
                self.values[index] = value
            elif key == "class":
                for step in plan.passes:
                    if isinstance(step.front, MixOp):
                        assert isinstance(step.columns, int)
                        value = self._mixed(value, step.front, table[:, step.columns :])
                self.values[index] = value
            elif key in FORMS:
                self.values[index] = move(value, table[:, plan.width :].unflatten(1, (3, 3)))

    def run_eager(self, op: EagerOp, drawn: Drawn) -> None:
        """Take everything through a module that Kornia runs."""
        values = [_to_kornia(key, value) for key, value in zip(self.keys, self.values, strict=True)]
        done = op.run(values, self.keys, drawn, self.device)
        self.values = [value.data if isinstance(value, Boxes) else value for value in done]

    def check_size(self, op: EagerOp, size: Size) -> None:
        """Refuse images of another size than the draws of the modules that follow are for.

        Raises:
            ArgumentError: If they are.
        """
        shape = tuple(self.values[self.keys.index("input")].shape)
        if shape != (size.batch, size.channels, size.height, size.width):
            raise ArgumentError(
                f"{op.name} must leave images of {(size.batch, size.channels, size.height, size.width)}, as its draws say, "
                f"got {shape}. Put it into a stage of its own, and what follows it into another."
            )

    def results(self, dtype: torch.dtype, memory_format: torch.memory_format, *, keepdim: bool) -> Any:
        """What the call returns: the images, or a list of all that went in."""
        values = list(self.values)
        for index, key in enumerate(self.keys):
            if key == "input":
                # Not in one call: that keeps the strides of what has the type already.
                values[index] = values[index].to(dtype).contiguous(memory_format=memory_format)
            elif key in FORMS:
                values[index] = from_vertices(values[index], key, self._dtypes[index])
            axis = self._missing[index]
            # As in Kornia, boxes and keypoints leave as they came.
            if axis is not None and (keepdim or key in FORMS):
                values[index] = values[index].squeeze(axis)
        return values[0] if len(values) == 1 else values


def matrix_of(plan: Plan, size: Size, drawn: dict[Op, Drawn]) -> Array:
    """Input pixel coordinates → output pixel coordinates over all passes, (B, 3, 3) or (1, 3, 3) float64."""
    total = np.eye(3)[None]
    for step in plan.passes:
        for op in step.front.order if isinstance(step.front, Gather) else ():
            assert isinstance(op, GatherOp)
            total = op.matrix(drawn[op], size) @ total
            size = op.out(size)
    return total


def _check(key: str, value: Any) -> None:
    if key == "class" or (key == "input" and isinstance(value, Ragged)):
        return
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(
            f"{key} must be a tensor, got {type(value).__name__}. Stack the samples of a batch: torch.stack(…)."
        )
    if key == "input" and value.dtype != torch.uint8 and not value.is_floating_point():
        raise ArgumentTypeError(
            f"images must be uint8 or floating, got {value.dtype}. Convert them: images.to(torch.uint8) or images.float()."
        )
    if key == "input" and value.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            "images must not require gradients, got images that do: fused augmentations are not differentiable. "
            "Pass images.detach(), or use Kornia itself."
        )
    if key not in FORMS and value.ndim not in (3, 4):
        raise ArgumentError(
            f"{key} must be (B, C, H, W) or one (C, H, W), got {tuple(value.shape)}. "
            "Flatten what comes before the channels: x.flatten(0, -4)."
        )


@functools.cache
def _name(key: Any) -> str:
    try:
        found = DataKey.get(key)
    except Exception as error:
        names = sorted({_NAMES.get(known, known.name.lower()) for known in DataKey})
        raise ArgumentError(f"data_keys must be among {', '.join(names)}, got {key!r}. Use Kornia's names.") from error
    return _NAMES.get(found, found.name.lower())


def _to_kornia(key: str, value: Any) -> Any:
    if key == "input":
        return value.float() / 255 if value.dtype == torch.uint8 else value.float()
    # Given as a tensor, boxes would come out upright, and the next rotation would turn those.
    return Boxes(value, False, mode="vertices_plus") if key.startswith("bbox") else value
