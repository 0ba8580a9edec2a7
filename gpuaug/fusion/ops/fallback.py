"""Fallback modules: modules that are not *lowered*, that is, replaced by an op. Kornia or torchvision runs them unchanged.

A fallback module runs at its position in the pipeline, between the fused passes. Its random numbers depend on the seed of the
batch, like the random numbers of ops, also if it draws from the generators of Python or NumPy. It receives copies of its
inputs, because it may modify them. The images have the dtype that they would have at this position without gpuaug.

A *data key* is the type of an input: ``"input"`` for images, ``"mask"``, ``"bbox"``, ``"class"`` for labels, and so on. Masks,
boxes, keypoints and labels are *targets*. A *sample* is an image or a clip of T frames. To *move* pixels is to change their
positions, so that masks, boxes and keypoints must change, too.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np
import torch
from kornia import augmentation as K
from kornia.augmentation.container.params import ParamItem
from kornia.geometry.boxes import Boxes
from torch import Tensor, nn

from gpuaug.core.errors import ArgumentError, ArgumentTypeError, add_note
from gpuaug.core.rng import Generators
from gpuaug.core.settings import initial_settings
from gpuaug.core.targets import LABELS, VALID, type_name
from gpuaug.core.torchvision_types import UNCHANGED_TYPE, all_parts, difference, torchvision_class, tv_tensor_class
from gpuaug.fusion.ops.base import Op, OpDraws, Size
from gpuaug.fusion.ops.kornia_private import with_frames_second
from gpuaug.fusion.ops.sampler import Gate, Sampler
from gpuaug.fusion.pixels import IMAGE_DTYPES, converted

LARGEST_EXACT_INTEGER = 2**24
"""Largest n such that float32 represents all integers from 0 to n."""

_UNMOVED_KEYS = (*LABELS.data_keys, *VALID.data_keys)
"""Data keys of labels and masks of valid boxes, which do not change if pixels move."""


ImageTypes = dict[int, list[type[Tensor]]]
"""Index of an input of images → class of each image or clip, such as ``tv_tensors.Image``."""


class OutputDtypeChange(Exception):
    """Internal signal: a fallback module returned images of another dtype than the pipeline was lowered for.

    Args:
        index: Index of the module among the fallback modules of the pipeline.
        dtype: dtype of the returned images.
    """

    def __init__(self, index: int, dtype: torch.dtype) -> None:
        super().__init__(index, dtype)
        self.index, self.dtype = index, dtype


class EagerOp(ABC):
    """Base class of fallback modules.

    Args:
        name: Name of the module in its container.
        module: Module of the user, called unchanged.
        reason: Reason why the module is not lowered, shown to the user.
        lowered: Op of the same module, which computes the output size. ``None`` if the module is not lowered for any size.
    """

    package: ClassVar[str]
    """Library that the module belongs to."""

    def __init__(self, name: str, module: nn.Module, reason: str, lowered: Op | None = None) -> None:
        self.name = name
        self.module = module
        self.reason = reason
        self.lowered = lowered
        self._parts = list(all_parts(module))
        """The module and all modules in it."""
        self.type_change = UNCHANGED_TYPE
        """Change of the class of images, such as ``tv_tensors.Image``, by preceding transforms that gpuaug does not run."""
        self.gates: tuple[Gate, ...] = ()
        """One condition per enclosing container that picks modules at random. The module runs for samples that meet all."""

    @property
    def keepdim(self) -> bool:
        """True if a single image (C, H, W) is returned without a batch dimension."""
        return bool(getattr(self.module, "keepdim", self.package == "torchvision"))

    @property
    def is_user_defined(self) -> bool:
        """True for a class defined outside Kornia and torchvision, and for ``v2.Lambda``, which calls a user's function."""
        return _is_user_defined(self.module)

    @property
    @abstractmethod
    def moves_nothing(self) -> bool:
        """True if the module is certain to leave masks, boxes and keypoints unchanged."""

    def moves(self, key: str) -> bool:
        """True if the library transforms inputs with this data key together with the images, or refuses them with an error.

        By default True for images, labels and ``"tv_tensors"``, containers of torchvision's tensors, only.
        """
        return key in ("input", "class", "tv_tensors")

    def check_keys(self, keys: Sequence[str], listed_keys: Sequence[str]) -> None:
        """Raise an error for inputs that the library would not transform together with the images.

        Args:
            keys: Data keys of all inputs of a call.
            listed_keys: Data keys of the inputs that are target dicts or lists of masks.

        Raises:
            ArgumentError: If the module may move pixels and the library does not move an input equally; or if the module mixes
                samples, and there are labels or a mask of valid boxes.
        """
        unmixed_keys = [key for key in keys if key in _UNMOVED_KEYS]
        mixes = any(isinstance(part, K.MixAugmentationBaseV2) and not isinstance(part, K.RandomJigsaw) for part in self._parts)
        if unmixed_keys and mixes:
            raise ArgumentError(
                f"{self.name} must be fused, so that {unmixed_keys[0]} can be mixed with the images, got a module that "
                f"{self.package} runs: {self.reason}. Put a RandomMixUpV2, or a RandomCutMixV2 with num_mix=1, into the list "
                "for gpuaug.fuse, outside of other containers, or mix in the dataset."
            )
        unsupported_keys = [key for key in keys if key in listed_keys or not self.moves(key)]
        if unsupported_keys and not self.moves_nothing:
            raise ArgumentError(
                f"{self.name} must be fused, or not move pixels, so that {unsupported_keys[0]} can be transformed with the "
                f"images, got a module that {self.package} runs: {self.reason}. Replace the module, or run it in the dataset."
            )

    @abstractmethod
    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw a seed for the generators that the module draws from, and the parameters that can be drawn before it runs."""

    @abstractmethod
    def out_drawn(self, draws: OpDraws, size: Size) -> Size:
        """Expected output size for input images of ``size``. The caller compares it with the actual outputs."""

    @abstractmethod
    def run(self, values: list[Any], keys: list[str], draws: OpDraws, device: torch.device, types: ImageTypes) -> list[Any]:
        """Run the module on copies of the inputs of a call.

        Args:
            values: Inputs: images, (B, C, H, W) or frames of clips (B · T, C, H, W), of a dtype in ``IMAGE_DTYPES``, and
                targets.
            keys: Data key of each input.
            draws: Draws of the batch.
            device: Device of the images.
            types: By index in ``values`` of an input of images, the class of each image or clip, such as ``tv_tensors.Image``,
                that the library would pass to the module. Replaced in place by the class that the module returns.

        Returns:
            Outputs, in the order of the inputs.

        Raises:
            OutputDtypeChange: If the module returns images of another dtype than the pipeline was lowered for.
        """

    @contextmanager
    def _name_module_in_errors(self) -> Iterator[None]:
        """Return a context in which errors get a note with the name of the module."""
        try:
            yield
        except Exception as error:
            source = self.name if self.is_user_defined else f"{self.package}, which runs {self.name}: {self.reason}"
            add_note(error, f"gpuaug: raised by {source}.")
            raise


def _is_user_defined(module: Any) -> bool:
    """Return whether the class of a module is defined outside Kornia and torchvision, or is ``v2.Lambda``."""
    class_ = type(module)
    return class_.__name__ == "Lambda" or not class_.__module__.startswith(("kornia.", "torchvision.", "gpuaug."))


def _seeded(device: torch.device, seed: int) -> Generators:
    """Return a context in which the global generators of torch, Python and NumPy have seeds derived from ``seed``."""
    return Generators(device, libraries=True).keyed(seed)


class EagerKornia(EagerOp):
    """Fallback module of Kornia or of the user, called once for the whole batch.

    Args:
        name, module, reason, lowered: See ``EagerOp``.
        extra_args: Setting ``extra_args`` of the enclosing ``AugmentationSequential``; ``None`` for Kornia's default.
    """

    package = "Kornia"

    def __init__(self, name: str, module: nn.Module, reason: str, lowered: Op | None = None, extra_args: Any = None) -> None:
        super().__init__(name, module, reason, lowered)
        self._settings: dict[str, Any] = {"transformation_matrix_mode": "skip", "extra_args": extra_args}
        if isinstance(module, K.VideoSequential):  # clips are always passed as (B, T, C, H, W)
            module = with_frames_second(module)
        # A container of Kornia applies the module to masks, boxes and keypoints as well. ``disable_features`` stops it from
        # keeping references to its outputs.
        with initial_settings():
            self._container = K.AugmentationSequential(cast(Any, module), **self._settings)
        self._container.disable_features = True
        self._is_video = isinstance(module, K.VideoSequential)
        """Whether the module itself accepts clips. Otherwise ``_clip_container`` runs it on clips, ``_container`` on images."""

    @property
    def moves_nothing(self) -> bool:
        """True for an ``IntensityAugmentationBase2D`` that overrides no method for masks, boxes or keypoints."""
        base = K.IntensityAugmentationBase2D
        handlers = ("apply_transform_mask", "apply_transform_box", "apply_transform_keypoint")
        return isinstance(self.module, base) and all(
            getattr(type(self.module), name) is getattr(base, name) for name in handlers
        )

    def moves(self, key: str) -> bool:
        """True if Kornia transforms an input with data key ``key`` as the images, refuses it, or need not change it."""
        return key in ("input", "tv_tensors", *_UNMOVED_KEYS) or _moves(self.module, key)

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw ``"key"``, a seed, and ``"params"``, Kornia's parameters, from generators with this seed (``OpDraws``)."""
        seed = sampler.key()
        frames = size.frames or int(self._is_video)  # a ``VideoSequential`` gets images as clips of one frame
        if frames:
            self._check_clips()
        shape = torch.Size((size.batch, *((frames,) if frames else ()), size.channels, size.height, size.width))
        makes_clips = frames > 0 and not self._is_video
        container = self._clip_container if makes_clips else self._container
        with self._name_module_in_errors(), _seeded(torch.device("cpu"), seed), initial_settings():
            params = container.forward_parameters(shape)
        # ``params`` of ``_clip_container`` has one element, of its ``VideoSequential``: the parameters, repeated per frame.
        return {"params": params[0].data if makes_clips else params, "key": seed, "frames": frames}

    def _check_clips(self) -> None:
        """Check that Kornia can run the module on clips.

        Raises:
            ArgumentError: If the module is a container, or a ``VideoSequential`` that shares draws among frames and holds one.
        """
        parts = self.module.children() if self._is_video else (self.module,)
        for part in parts if getattr(self.module, "same_on_frame", True) else ():
            if isinstance(part, K.container.ImageSequentialBase):
                raise ArgumentError(
                    f"{self.name} must be fused for clips, got {type(part).__name__}, a container that Kornia runs on images "
                    f"only: {self.reason}. Pass its modules in a list, without the container, or run it in the dataset."
                )

    @cached_property
    def _clip_container(self) -> K.AugmentationSequential:
        """Container of Kornia that runs the module on clips, in a ``VideoSequential``. Created for the first clips."""
        with initial_settings():
            video = K.VideoSequential(self.module)
            container = K.AugmentationSequential(video, **self._settings)
        container.disable_features = video.disable_features = True
        return container

    def out_drawn(self, draws: OpDraws, size: Size) -> Size:
        """Output size according to Kornia's parameters; the input size if a sample skips the module."""
        item: ParamItem = draws["params"][0]
        if self.lowered is not None and isinstance(item.data, dict):
            is_applied = not self.lowered.is_random or bool((item.data["batch_prob"] > 0.5).all())  # 1: applied, 0: skipped
            return self.lowered.out(size) if is_applied else size
        return _out_drawn(item, size)

    def run(self, values: list[Any], keys: list[str], draws: OpDraws, device: torch.device, types: ImageTypes) -> list[Any]:
        """Run the module on float32 copies of the images, and on copies of all other inputs. Arguments: see ``EagerOp.run``."""
        for key, value in zip(keys, values, strict=True):
            if key == "mask":
                self._check_mask_values(value)
        frames = draws["frames"]
        inputs = [_for_kornia(key, value, frames) for key, value in zip(keys, values, strict=True)]
        for index, classes in types.items() if self.is_user_defined else ():
            if len(set(classes)) == 1:
                inputs[index] = inputs[index].as_subclass(self.type_change(classes[0]))
        container = self._container
        params = draws["params"]
        if frames and not self._is_video:  # as in ``draw``
            container = self._clip_container
            params = [ParamItem(next(name for name, _ in container.named_children()), params)]
        with self._name_module_in_errors(), _seeded(device, draws["key"]), initial_settings(), torch.no_grad():
            outputs = container(*inputs, params=params, data_keys=keys)
        results = outputs if isinstance(outputs, list | tuple) else [outputs]
        results = [result.data if isinstance(result, Boxes) else result for result in results]
        for index in types:
            results[index] = results[index].as_subclass(Tensor)
        return [_from_kornia(*item, frames) for item in zip(keys, results, values, strict=True)] if frames else results

    def _check_mask_values(self, mask: Tensor) -> None:
        """Raise an error for integer masks with values above 2**24, because Kornia converts masks to float32.

        Without this check, an assertion of Kornia fails on the device, after which the process cannot use the GPU.

        Raises:
            ArgumentError: If a value exceeds 2**24 in magnitude.

        Cost:
            The host waits for the device if the mask is int32 or int64.
        """
        if mask.dtype not in (torch.int32, torch.int64) or not mask.numel():
            return
        largest = int(mask.abs().max())
        if largest > LARGEST_EXACT_INTEGER:
            raise ArgumentError(
                f"mask must hold values of at most 2**24 for {self.name}, which Kornia runs in float32, got {largest}. Number "
                "the labels: torch.unique(mask, return_inverse=True)[1]."
            )


def _out_drawn(item: Any, size: Size) -> Size:
    """Output size of a module for images of ``size``. ``item``: Kornia's parameters; a container has a list of items in it."""
    data = getattr(item, "data", None)
    for inner in data if isinstance(data, list) else ():
        size = _out_drawn(inner, size)
    if isinstance(data, dict) and len(data.get("output_size", ())) and bool((data["batch_prob"] > 0.5).all()):
        size = size.to(*data["output_size"][0].int().tolist())
    return size


def _moves(module: nn.Module, key: str) -> bool:
    """Return whether Kornia transforms inputs with data key ``key`` as ``module`` transforms images, or refuses them."""
    if isinstance(module, K.container.ImageSequentialBase):
        return all(_moves(child, key) for child in module.children())
    if isinstance(module, K.auto.operations.OperationBase):
        return _moves(module.op, key)
    if isinstance(module, K.MixAugmentationBaseV2):
        return True
    # Kornia calls any other module on the images only. Boxes and keypoints are mapped by the matrix of a module. Subclasses of
    # GeometricAugmentationBase2D have one; RandomElasticTransform, RandomThinPlateSpline and RandomFisheye have none.
    # A module that does not override ``apply_transform_mask`` raises NotImplementedError for masks.
    if key == "mask":
        base = K.AugmentationBase2D
        return isinstance(module, base) and type(module).apply_transform_mask is not base.apply_transform_mask
    return isinstance(module, K.GeometricAugmentationBase2D | K.IntensityAugmentationBase2D)


def _for_kornia(key: str, value: Any, frames: int) -> Any:
    """Return a copy of an input in the shape that Kornia takes: clips of ``frames`` frames, or images if ``frames`` is 0."""
    if key == "input":
        value = converted(value, torch.float32, copy=True)
        return value.unflatten(0, (len(value) // frames, frames)) if frames else value
    value = value.clone() if isinstance(value, Tensor) else value
    if frames and key == "mask":
        value = value.unflatten(0, (len(value) // frames, frames))
    if frames and (key.startswith("bbox") or key == "keypoints"):
        # Kornia takes equally many boxes for each frame. All frames of a clip are transformed equally, so the boxes of a clip,
        # padded with zeros, can be divided among its frames.
        missing = -value.shape[1] % frames
        value = torch.cat((value, value.new_zeros(len(value), missing, *value.shape[2:])), 1).unflatten(1, (frames, -1))
    # For a tensor Kornia returns axis-aligned boxes, which a later rotation would enlarge; for ``Boxes`` it returns vertices.
    if key.startswith("bbox"):
        return Boxes(value.flatten(0, 1) if frames else value, False, mode="vertices_plus")
    return value


def _from_kornia(key: str, result: Any, value: Any, frames: int) -> Any:
    """Return a result of Kornia for clips, converted to the shape of the input ``value``. Reverses ``_for_kornia``."""
    if key in ("input", "mask"):
        return result.flatten(0, 1)
    if key.startswith("bbox"):
        result = result.unflatten(0, (len(value), frames))
    return result.flatten(1, 2)[:, : value.shape[1]] if key.startswith("bbox") or key == "keypoints" else result


COLOUR_ONLY = frozenset({
    "ColorJitter", "GaussianBlur", "GaussianNoise", "Grayscale", "JPEG", "LinearTransformation", "Normalize",
    "RandomAdjustSharpness", "RandomAutocontrast", "RandomChannelPermutation", "RandomEqualize", "RandomErasing",
    "RandomGrayscale", "RandomInvert", "RandomPhotometricDistort", "RandomPosterize", "RandomSolarize", "RGB", "ToDtype",
})  # fmt: skip
"""Names of torchvision transforms that do not change masks, boxes and keypoints."""


class EagerTorchvision(EagerOp):
    """Fallback module of a torchvision pipeline, called once per image or clip.

    Args:
        name: Name of the module in its container.
        module: Module of the user, called unchanged. It draws its parameters when it is called.
        reason: Reason why the module is not lowered, shown to the user.
        lowered: Op of the same module, if it is lowered for other image sizes; else ``None``.
        dtype: dtype of the images that the module gets.
        out_dtype: dtype that the module is assumed to return, for which the ops after it were lowered.
        index: Index of the module among the fallback modules of the pipeline.
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
        index: int,
    ) -> None:
        super().__init__(name, module, reason, lowered)
        self._dtype, self._out_dtype, self._index = dtype, out_dtype, index
        is_of_torchvision = type(module).__module__.startswith("torchvision.transforms.v2.")
        self._runs_user_code = not is_of_torchvision or any(map(_is_user_defined, self._parts))
        """Whether the transform, or one in it, is defined by the user, and may depend on the class of the images."""
        self.members_move_nothing = False
        """True for a container of torchvision whose transforms all leave masks, boxes and keypoints unchanged."""

    @property
    def moves_nothing(self) -> bool:
        """True for classes in ``COLOUR_ONLY``, subclasses that override none of their methods, and containers of these."""
        class_ = torchvision_class(self.module)
        is_colour_only = class_ is not None and class_.__name__ in COLOUR_ONLY and difference(self.module, class_) is None
        return self.members_move_nothing or is_colour_only

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw ``"key"``, a seed, and ``"apply_mask"``, True for the samples that the module is called for (``OpDraws``)."""
        applies = np.ones(size.batch, dtype=bool)
        for gate in self.gates:
            applies = applies & gate.applies(sampler)
        return {"key": sampler.key(), "apply_mask": applies, "frames": size.frames}

    def out_drawn(self, draws: OpDraws, size: Size) -> Size:
        """Output size of ``lowered``, or the input size without it."""
        return size if self.lowered is None else self.lowered.out(size)

    def run(self, values: list[Any], keys: list[str], draws: OpDraws, device: torch.device, types: ImageTypes) -> list[Any]:
        """Run the module on copies of the images whose apply mask is True. All other inputs are returned unchanged."""
        return [
            self._outputs(value, types[index], draws, device) if index in types else value for index, value in enumerate(values)
        ]

    def _outputs(self, images: Tensor, classes: list[type[Tensor]], draws: OpDraws, device: torch.device) -> Tensor:
        """Return output images, (B, C, H, W), or frames of clips, (B · T, C, H, W). ``classes``: see ``types`` of ``run``."""
        batch = converted(images, self._dtype, copy=True)
        applies = draws["apply_mask"].tolist()
        frames = draws["frames"]
        if frames:
            batch = batch.unflatten(0, (-1, frames)) if len(images) else batch[:, None].expand(-1, frames, -1, -1, -1)
        if not len(images):  # run on a black image, to learn size and dtype of the empty output
            batch = batch.new_zeros((1, *batch.shape[1:]))
            applies = [True]
        classes[:] = [self.type_change(class_) for class_ in classes or [Tensor]]
        outputs: list[Tensor] = []
        with self._name_module_in_errors(), _seeded(device, draws["key"]), initial_settings(), torch.no_grad():
            for index, (image, runs) in enumerate(zip(batch, applies, strict=True)):
                outputs.append(self._output(image, index, classes) if runs else image)
        sizes = list(dict.fromkeys("x".join(map(str, output.shape)) for output in outputs))
        if len(sizes) > 1:
            raise ArgumentError(
                f"{self.name} must return all images of a batch in one size, got {' and '.join(sizes)}. Run it in the "
                "dataset, or make it return one size."
            )
        self._check_types({output.dtype for output in outputs})
        return (torch.cat(outputs) if frames else torch.stack(outputs))[: len(images)]

    def _output(self, image: Tensor, index: int, classes: list[type[Tensor]]) -> Tensor:
        """Return the output of the module for ``image``, image or clip ``index``, and write its class into ``classes``."""
        if classes[index] is Tensor and not self._runs_user_code:
            # As an image, a plain tensor gets the fill value that is set for images; as a video, a clip is transformed at once.
            output = self.module(image.as_subclass(tv_tensor_class("Video" if image.ndim == 4 else "Image")))
        else:
            output = self.module(image.as_subclass(classes[index]))
            classes[index] = type(output) if type_name(output) else Tensor
        if not isinstance(output, Tensor):
            raise ArgumentTypeError(f"{self.name} must return a tensor, got {type(output).__name__}. Run it in the dataset.")
        return output.as_subclass(Tensor)

    def _check_types(self, dtypes: set[torch.dtype]) -> None:
        """Check the dtypes of all outputs of a batch.

        Raises:
            ArgumentTypeError: If there are several dtypes, or one is not in ``IMAGE_DTYPES``.
            OutputDtypeChange: If the dtype is not ``out_dtype``.
        """
        other = next((dtype for dtype in dtypes if dtype not in IMAGE_DTYPES), None)
        # With gates, samples may skip the module and keep the dtype of the input.
        if other is None and (len(dtypes) > 1 or (self.gates and self._dtype not in dtypes)):
            other = next(dtype for dtype in dtypes if dtype != self._dtype)
        if other is not None:
            raise ArgumentTypeError(
                f"{self.name} must return all images of a batch in one type, uint8, uint16, int16 or floating, got {other} for "
                f"images of {self._dtype}. Make it return the type of its input. To convert, put "
                "v2.ToDtype(torch.float32, scale=True) before it."
            )
        (dtype,) = dtypes
        if dtype != self._out_dtype:
            raise OutputDtypeChange(self._index, dtype)


def fallback_of(op: Op, reason: str) -> EagerOp:
    """Create the fallback module for the module of ``op``, for images of sizes that ``op`` does not support."""
    if op.package == "Kornia":
        return EagerKornia(op.name, op.module, reason, op)
    dtype: torch.dtype = getattr(op, "image_dtype", torch.float32)
    fallback = EagerTorchvision(op.name, op.module, reason, op, dtype=dtype, out_dtype=dtype, index=-1)
    fallback.gates = op.gates
    fallback.type_change = getattr(op, "type_change", UNCHANGED_TYPE)
    return fallback
