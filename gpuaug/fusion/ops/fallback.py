"""Modules left to their own library: each runs as it is, in its place, with draws that are keyed like those of ops.

A module is given copies, in the type that its library would give it there: it may write into what it is given.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from kornia import augmentation as K
from kornia.augmentation.container.params import ParamItem
from kornia.geometry.boxes import Boxes
from torch import Tensor, nn

from gpuaug.core.errors import ArgumentError, ArgumentTypeError, add_note
from gpuaug.core.rng import Generators
from gpuaug.core.settings import initial_settings
from gpuaug.fusion.ops.base import Op, OpDraws, Size
from gpuaug.fusion.ops.sampler import Gate, Sampler, always
from gpuaug.fusion.pixels import PIXELS, converted

MOST_COUNTED = 2**24
"""Largest whole number up to which float32 holds all."""


class Retyped(Exception):
    """Signal, never seen by users: a fallback module returned images of another type than the pipeline was lowered for.

    Args:
        number: The module's number, as ``ImageTypes`` counts.
        dtype: Type that it returned.
    """

    def __init__(self, number: int, dtype: torch.dtype) -> None:
        super().__init__(number, dtype)
        self.number, self.dtype = number, dtype


class EagerOp(ABC):
    """A module that is not lowered.

    Args:
        name: Its name in its container.
        module: The user's module, called as it is.
        reason: Why it is not lowered, in words for the user.
        lowered: The op for other images or settings, which knows the output size; ``None`` without one.
    """

    package: ClassVar[str]
    """Whose the module is."""

    def __init__(self, name: str, module: nn.Module, reason: str, lowered: Op | None = None) -> None:
        self.name = name
        self.module = module
        self.reason = reason
        self.lowered = lowered
        self.gates: tuple[Gate, ...] = ()

    @property
    def keepdim(self) -> bool:
        """True if a single image, (C, H, W), comes out as one."""
        return bool(getattr(self.module, "keepdim", self.package == "torchvision"))

    @property
    def is_users(self) -> bool:
        """True for a module or function of the user's own, also within a ``v2.Lambda``."""
        kind = type(self.module)
        return kind.__name__ == "Lambda" or not kind.__module__.startswith(("kornia.", "torchvision."))

    @property
    @abstractmethod
    def moves_nothing(self) -> bool:
        """True if the module is known to leave masks, boxes and keypoints unchanged."""

    def moves(self, key: str) -> bool:
        """Whether the library moves values with a data key of Kornia's as the module moves pixels, or says that it cannot."""
        return key in ("input", "class", "tv_tensors")

    @abstractmethod
    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """The parameters that the module draws before it runs, and a seed for its draws while it runs."""

    @abstractmethod
    def out_drawn(self, drawn: OpDraws, size: Size) -> Size:
        """The output size, as far as it is known from the draws."""

    @abstractmethod
    def run(self, values: list[Any], keys: list[str], drawn: OpDraws, device: torch.device) -> list[Any]:
        """The module on copies of images, (B · T, C, H, W) of a type in ``PIXELS``, and of the targets that follow them.

        Raises:
            Retyped: If the images that the module returns are of another type than the pipeline was lowered for.
        """

    @contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            by = self.name if self.is_users else f"{self.package} in {self.name}, which is left to it: {self.reason}"
            add_note(error, f"gpuaug: raised by {by}.")
            raise


class EagerKornia(EagerOp):
    """A module of Kornia's, or the user's, that runs on the whole batch."""

    package = "Kornia"

    def __init__(self, name: str, module: nn.Module, reason: str, lowered: Op | None = None) -> None:
        super().__init__(name, module, reason, lowered)
        # Kornia's container knows how each of its modules treats masks, boxes and keypoints. It is kept out of the module
        # tree, and without features it keeps no output alive.
        if isinstance(module, K.VideoSequential):  # which is given clips in one form
            video: Any = copy.copy(module)
            video.data_format = "BTCHW"
            video._temporal_channel = 1
            module = video
        with initial_settings():
            self._container = K.AugmentationSequential(cast(Any, module), transformation_matrix_mode="skip")
        self._container.disable_features = True
        self._is_video = isinstance(module, K.VideoSequential)
        self._of_clips: Any = None
        """The container for clips, made when it is first used."""

    @property
    def moves_nothing(self) -> bool:
        """True if it is an intensity augmentation that overrides no handler of masks, boxes or keypoints."""
        base = K.IntensityAugmentationBase2D
        handlers = ("apply_transform_mask", "apply_transform_box", "apply_transform_keypoint")
        return isinstance(self.module, base) and all(
            getattr(type(self.module), name) is getattr(base, name) for name in handlers
        )

    def moves(self, key: str) -> bool:
        """Whether Kornia moves values with a data key as the module moves pixels, or raises an error."""
        return key in ("input", "class", "valid", "tv_tensors") or _moves(self.module, key)

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Kornia's own parameters, drawn under a seed from ``sampler``, and the seed for draws while the module runs."""
        key = sampler.key()
        frames = size.frames or int(self._is_video)
        shape = torch.Size((size.batch, *((frames,) if frames else ()), size.channels, size.height, size.width))
        with self._named_in_errors(), Generators(torch.device("cpu")).keyed(key), initial_settings():
            params = self._container_for(frames).forward_parameters(shape)
        # Parameters of a clip are repeated for its frames, in the form of the VideoSequential that the module is in.
        return {"params": params[0].data if frames and not self._is_video else params, "key": key, "frames": frames}

    def _container_for(self, frames: int) -> K.AugmentationSequential:
        """The container for images, or for clips."""
        if not frames or self._is_video:
            return self._container
        if self._of_clips is None:
            with initial_settings():
                video = K.VideoSequential(self.module)
                self._of_clips = K.AugmentationSequential(video, transformation_matrix_mode="skip")
            self._of_clips.disable_features = video.disable_features = True
        return cast(K.AugmentationSequential, self._of_clips)

    def out_drawn(self, drawn: OpDraws, size: Size) -> Size:
        """The output size, as far as it is known from the parameters."""
        item: ParamItem = drawn["params"][0]
        if not isinstance(item.data, dict) or not bool((item.data["batch_prob"] > 0.5).all()):
            return size
        if self.lowered is not None:
            return self.lowered.out(size)
        if "output_size" in item.data and len(item.data["output_size"]):
            height, width = item.data["output_size"][0].tolist()
            return size.to(int(height), int(width))
        return size

    def run(self, values: list[Any], keys: list[str], drawn: OpDraws, device: torch.device) -> list[Any]:
        """The module on float32 copies of the images, and on copies of the targets that follow them."""
        for key, value in zip(keys, values, strict=True):
            if key == "mask":
                self._check_labels(value)
        frames = drawn["frames"]
        taken = [_for_kornia(key, value, frames) for key, value in zip(keys, values, strict=True)]
        container = self._container_for(frames)
        params = drawn["params"]
        if container is self._of_clips:
            params = [ParamItem(next(name for name, _ in container.named_children()), params)]
        with self._named_in_errors(), Generators(device).keyed(drawn["key"]), initial_settings(), torch.no_grad():
            done = container(*taken, params=params, data_keys=keys)
        made = done if isinstance(done, list | tuple) else [done]
        made = [each.data if isinstance(each, Boxes) else each for each in made]
        return [_from_kornia(*each, frames) for each in zip(keys, made, values, strict=True)] if frames else made

    def _check_labels(self, mask: Tensor) -> None:
        """Refuse masks of whole numbers that float32, in which Kornia computes, does not hold.

        Kornia would do so by an assertion on the device, after which a process cannot use its GPU.

        Raises:
            ArgumentError: If there are such numbers.

        Cost:
            The host waits for the device, for masks of 32 or 64 bits.
        """
        if mask.dtype not in (torch.int32, torch.int64) or not mask.numel():
            return
        largest = int(mask.abs().max())
        if largest > MOST_COUNTED:
            raise ArgumentError(
                f"mask must hold values of at most 2**24 where {self.name} is left to Kornia, which computes in float32, got "
                f"{largest}. Number the labels: torch.unique(mask, return_inverse=True)[1]."
            )


def _moves(module: nn.Module, key: str) -> bool:
    """Whether Kornia moves masks, boxes or keypoints as ``module`` moves pixels, or raises an error for them."""
    if isinstance(module, K.container.ImageSequentialBase):
        return all(_moves(child, key) for child in module.children())
    if isinstance(module, K.auto.operations.OperationBase):
        return _moves(module.op, key)
    if isinstance(module, K.MixAugmentationBaseV2):
        return True
    # Kornia calls any other module on the images alone. It moves boxes and keypoints by a matrix, which RandomElasticTransform,
    # RandomThinPlateSpline and RandomFisheye do not have: these are no geometric augmentations to it.
    if key == "mask":
        return isinstance(module, K.AugmentationBase2D)
    return isinstance(module, K.GeometricAugmentationBase2D | K.IntensityAugmentationBase2D)


def _for_kornia(key: str, value: Any, frames: int) -> Any:
    """A copy of an input in Kornia's form; of clips of so many frames where that is not 0."""
    if key == "input":
        value = converted(value, torch.float32, copy=True)
        return value.unflatten(0, (len(value) // frames, frames)) if frames else value
    value = value.clone() if isinstance(value, Tensor) else value
    if frames and key == "mask":
        value = value.unflatten(0, (len(value) // frames, frames))
    if frames and (key.startswith("bbox") or key == "keypoints"):
        # All boxes of a clip move alike, so it does not matter to which frame each is given.
        missing = -value.shape[1] % frames
        value = torch.cat((value, value.new_zeros(len(value), missing, *value.shape[2:])), 1).unflatten(1, (frames, -1))
    # Given as a tensor, boxes would come out upright, and the next rotation would turn those.
    if key.startswith("bbox"):
        return Boxes(value.flatten(0, 1) if frames else value, False, mode="vertices_plus")
    return value


def _from_kornia(key: str, made: Any, value: Any, frames: int) -> Any:
    """A result of Kornia's for clips, in the form of the input that it was made of."""
    if key in ("input", "mask"):
        return made.flatten(0, 1)
    if key.startswith("bbox"):
        made = made.unflatten(0, (len(value), frames))
    return made.flatten(1, 2)[:, : value.shape[1]] if key.startswith("bbox") or key == "keypoints" else made


COLOUR_ONLY = frozenset(
    {
        *("ColorJitter", "GaussianBlur", "GaussianNoise", "Grayscale", "JPEG", "Normalize", "RandomAdjustSharpness"),
        *("RandomAutocontrast", "RandomChannelPermutation", "RandomEqualize", "RandomErasing", "RandomGrayscale"),
        *("RandomInvert", "RandomPhotometricDistort", "RandomPosterize", "RandomSolarize", "RGB", "ToDtype"),
    }
)
"""Transforms of torchvision's that leave masks, boxes and keypoints unchanged."""


class EagerTorchvision(EagerOp):
    """A transform of torchvision's, or a module in a container of torchvision's, called image by image or clip by clip.

    Args:
        name: Its name in its container.
        module: The user's, called as it is. It draws when it runs, for each image.
        reason: Why it is not lowered, in words for the user.
        lowered: The op for other images or settings; ``None`` without one.
        dtype: Type of the images that it is given.
        out_dtype: Type of the images that it returned before; the type that it is given, unless that is known.
        number: Its number among the fallback modules of the pipeline.
    """

    package = "torchvision"

    def __init__(
        self,
        name: str,
        module: nn.Module,
        reason: str,
        lowered: Op | None = None,
        *,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        number: int,
    ) -> None:
        super().__init__(name, module, reason, lowered)
        self._dtype, self._out_dtype, self._number = dtype, out_dtype, number

    @property
    def moves_nothing(self) -> bool:
        """True if its type is known to change colours only."""
        kind = type(self.module)
        return kind.__module__.startswith("torchvision.") and kind.__name__ in COLOUR_ONLY

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """A seed for the transform's draws, and the mask of the samples that it is called for."""
        applies = always(size.batch)
        for gate in self.gates:
            applies = applies & gate.applies(sampler)
        return {"key": sampler.key(), "apply_mask": applies, "frames": size.frames}

    def out_drawn(self, drawn: OpDraws, size: Size) -> Size:
        """The output size of the lowered op; without one, the input size."""
        return size if self.lowered is None else self.lowered.out(size)

    def run(self, values: list[Any], keys: list[str], drawn: OpDraws, device: torch.device) -> list[Any]:
        """The transform on a copy of each image that it applies to; masks, boxes and keypoints are unchanged."""
        return [
            self._images(value, drawn, device) if key == "input" else value for key, value in zip(keys, values, strict=True)
        ]

    def _images(self, images: Tensor, drawn: OpDraws, device: torch.device) -> Tensor:
        batch = converted(images, self._dtype, copy=True)
        applies = drawn["apply_mask"].tolist()
        frames = drawn["frames"]
        if frames:
            batch = batch.unflatten(0, (-1, frames)) if len(images) else batch[:, None].expand(-1, frames, -1, -1, -1)
        if not len(images):  # a black image tells size and type of what a full batch becomes
            batch = batch.new_zeros((1, *batch.shape[1:]))
            applies = [True]
        with self._named_in_errors(), Generators(device).keyed(drawn["key"]), initial_settings(), torch.no_grad():
            made = [self._image(image) if runs else image for image, runs in zip(batch, applies, strict=True)]
        sizes = list(dict.fromkeys("x".join(map(str, each.shape)) for each in made))
        if len(sizes) > 1:
            raise ArgumentError(
                f"{self.name} must give all images of a batch one size, got {' and '.join(sizes)}. Keep it in the dataset, or "
                "resize in it."
            )
        self._check_types({each.dtype for each in made})
        return (torch.cat(made) if frames else torch.stack(made))[: len(images)]

    def _image(self, image: Tensor) -> Tensor:
        made = self.module(image)
        if not isinstance(made, Tensor):
            raise ArgumentTypeError(f"{self.name} must give a tensor, got {type(made).__name__}. Keep it in the dataset.")
        return made.as_subclass(Tensor)

    def _check_types(self, made: set[torch.dtype]) -> None:
        other = next((dtype for dtype in made if dtype not in PIXELS), None)
        if other is None and (len(made) > 1 or (self.gates and self._dtype not in made)):
            other = next(dtype for dtype in made if dtype != self._dtype)
        if other is not None:
            raise ArgumentTypeError(
                f"{self.name} must give all images of a batch one type, uint8, uint16, int16 or floating, got {other} of "
                f"images of {self._dtype}. Have it return the type that it is passed. To convert, put "
                "v2.ToDtype(torch.float32, scale=True) before it."
            )
        (dtype,) = made
        if dtype != self._out_dtype:
            raise Retyped(self._number, dtype)


def left(op: Op, reason: str) -> EagerOp:
    """A lowered op for images of a size that it is not lowered for."""
    if op.package == "Kornia":
        return EagerKornia(op.name, op.module, reason, op)
    dtype: torch.dtype = getattr(op, "image_dtype", torch.float32)
    made = EagerTorchvision(op.name, op.module, reason, op, dtype=dtype, out_dtype=dtype, number=-1)
    made.gates = op.gates
    return made
