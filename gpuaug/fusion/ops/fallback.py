"""Modules left to their own library: each runs as it is, in its place, with draws that are keyed like those of ops."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from kornia import augmentation as K
from kornia.augmentation.container.params import ParamItem
from torch import Tensor, nn

from gpuaug.core.errors import ArgumentError, ArgumentTypeError, add_note
from gpuaug.core.rng import Generators
from gpuaug.core.settings import initial_settings
from gpuaug.fusion.ops.base import Op, OpDraws, Size
from gpuaug.fusion.ops.sampler import Gate, Sampler, always


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
    @abstractmethod
    def moves_nothing(self) -> bool:
        """True if the module is known to leave masks, boxes and keypoints unchanged."""

    @abstractmethod
    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """The parameters that the module draws before it runs, and a seed for its draws while it runs."""

    @abstractmethod
    def out(self, size: Size, drawn: OpDraws) -> Size:
        """The output size, as far as it is known from the draws."""

    @abstractmethod
    def run(self, values: list[Any], keys: list[str], drawn: OpDraws, device: torch.device) -> list[Any]:
        """The module on images (float32) and what follows them."""

    @contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            add_note(error, f"gpuaug: raised by {self.package} in {self.name}, which is left to it: {self.reason}.")
            raise


class EagerKornia(EagerOp):
    """A module of Kornia's, or the user's, that runs on the whole batch."""

    package = "Kornia"

    def __init__(self, name: str, module: nn.Module, reason: str, lowered: Op | None = None) -> None:
        super().__init__(name, module, reason, lowered)
        # Kornia's container knows how each of its modules treats masks, boxes and keypoints. It is kept out of the module
        # tree, and without features it keeps no output alive.
        with initial_settings():
            self._container = K.AugmentationSequential(cast(Any, module), transformation_matrix_mode="skip")
        self._container.disable_features = True
        self.child_name = next(name for name, _ in self._container.named_children())

    @property
    def moves_nothing(self) -> bool:
        """True if it is an intensity augmentation that overrides no handler of masks, boxes or keypoints."""
        base = K.IntensityAugmentationBase2D
        handlers = ("apply_transform_mask", "apply_transform_box", "apply_transform_keypoint")
        return isinstance(self.module, base) and all(
            getattr(type(self.module), name) is getattr(base, name) for name in handlers
        )

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Kornia's own parameters, drawn under a seed from ``sampler``, and the seed for draws while the module runs."""
        key = sampler.key()
        shape = torch.Size((size.batch, size.channels, size.height, size.width))
        with self._named_in_errors(), Generators(torch.device("cpu")).keyed(key), initial_settings():
            return {"params": self._container.forward_parameters(shape), "key": key}

    def out(self, size: Size, drawn: OpDraws) -> Size:
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
        """The module on images (float32) and what follows them."""
        with self._named_in_errors(), Generators(device).keyed(drawn["key"]), initial_settings(), torch.no_grad():
            done = self._container(*values, params=drawn["params"], data_keys=keys)
        return list(done) if isinstance(done, list | tuple) else [done]


COLOUR_ONLY = frozenset(
    {
        *("ColorJitter", "GaussianBlur", "GaussianNoise", "Grayscale", "JPEG", "Normalize", "RandomAdjustSharpness"),
        *("RandomAutocontrast", "RandomChannelPermutation", "RandomEqualize", "RandomErasing", "RandomGrayscale"),
        *("RandomInvert", "RandomPhotometricDistort", "RandomPosterize", "RandomSolarize", "RGB"),
    }
)
"""Transforms of torchvision's that leave masks, boxes and keypoints unchanged."""


class EagerTorchvision(EagerOp):
    """A transform of torchvision's, or a module in a container of torchvision's, that is called image by image.

    Args:
        name: Its name in its container.
        module: The user's, called as it is. It draws when it runs, for each image.
        reason: Why it is not lowered, in words for the user.
        lowered: The op for other images or settings; ``None`` without one.
        bytes_wanted: True if it is given uint8 images, False for float32.
    """

    package = "torchvision"

    def __init__(
        self, name: str, module: nn.Module, reason: str, lowered: Op | None = None, *, bytes_wanted: bool = False
    ) -> None:
        super().__init__(name, module, reason, lowered)
        self._bytes_wanted = bytes_wanted

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
        return {"key": sampler.key(), "apply_mask": applies}

    def out(self, size: Size, drawn: OpDraws) -> Size:
        """The output size of the lowered op; without one, the input size."""
        return size if self.lowered is None else self.lowered.out(size)

    def run(self, values: list[Any], keys: list[str], drawn: OpDraws, device: torch.device) -> list[Any]:
        """The transform on each image that it applies to; masks, boxes and keypoints are unchanged."""
        return [
            self._images(value, drawn, device) if key == "input" else value for key, value in zip(keys, values, strict=True)
        ]

    def _images(self, images: Tensor, drawn: OpDraws, device: torch.device) -> Tensor:
        with self._named_in_errors(), Generators(device).keyed(drawn["key"]), initial_settings(), torch.no_grad():
            made = [
                self._image(image) if applies else image
                for image, applies in zip(images, drawn["apply_mask"].tolist(), strict=True)
            ]
        sizes = list(dict.fromkeys("x".join(map(str, each.shape)) for each in made))
        if len(sizes) > 1:
            raise ArgumentError(
                f"{self.name} must give all images of a batch one size, got {' and '.join(sizes)}. Keep it in the dataset, or "
                "resize in it."
            )
        return torch.stack(made) if made else images

    def _image(self, image: Tensor) -> Tensor:
        given = (image * 255).round().clamp(0, 255).to(torch.uint8) if self._bytes_wanted else image
        made = self.module(given)
        if not isinstance(made, Tensor):
            raise ArgumentTypeError(f"{self.name} must give a tensor, got {type(made).__name__}. Keep it in the dataset.")
        made = made.as_subclass(Tensor)
        return made.float() / 255 if made.dtype == torch.uint8 else made.float()


def left(op: Op, reason: str) -> EagerOp:
    """A lowered op for images of a size that it is not lowered for."""
    if op.package == "Kornia":
        return EagerKornia(op.name, op.module, reason, op)
    made = EagerTorchvision(op.name, op.module, reason, op, bytes_wanted=getattr(op, "units", "") == "bytes")
    made.gates = op.gates
    return made
