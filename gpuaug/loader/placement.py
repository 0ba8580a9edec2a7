"""The device of a loader, its lanes and its stages on them, made when they are first needed."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from gpuaug.core import devices
from gpuaug.core.streams import Lanes
from gpuaug.stages.base import BoundStage, Stage, as_stages, bind_all, names_of
from gpuaug.stages.copy import Copier
from gpuaug.stages.feature import check_device


class Placement:
    """The device of one loader, its lanes and its stages.

    A device without an index is the one that is current as the first iterator begins: frameworks set a rank's device when the
    loader may be there already. Until then lanes are made only for who asks for them, and again if another device is current.

    Args:
        device: As the user gave it.
        warns: Whether the copy lane expects batches in page-locked memory.
    """

    def __init__(self, device: torch.device | str | int | None, *, warns: bool) -> None:
        self._wanted = devices.requested(device)
        self._warns = warns
        self._stages: tuple[Stage, ...] = ()

    @property
    def device(self) -> torch.device:
        """Where batches go: before the first iterator, where they would go if it began now."""
        return devices.with_index(self._wanted)

    def settle(self) -> None:
        """Fix the device: that which is current as the first iterator begins."""
        if self._wanted != (now := self.device):
            if "lanes" in vars(self) and self.lanes.device != now:
                self._forget("lanes", "copier", "bound")
            self._wanted = now

    @cached_property
    def lanes(self) -> Lanes:
        """The lanes on the device."""
        return Lanes(self.device)

    @cached_property
    def copier(self) -> Copier:
        """Copies batches on the copy lane."""
        return Copier(self.lanes.device, warns=self._warns)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, in order, as the user made them."""
        return self._stages

    @stages.setter
    def stages(self, value: Sequence[Any]) -> None:
        """Replace the stages.

        Raises:
            ArgumentTypeError: If it is not a sequence of stages and callables.
            ArgumentError: If two stages were given one name.
            DeviceError: If an encoder is on another device.
        """
        new = tuple(as_stages(value))
        for stage in new:
            check_device(stage, self._wanted)
        bound = None if self._wanted != self.device else bind_all(new, self.lanes)
        self._stages = new
        self._forget("bound")
        if bound is not None:
            self.bound = bound

    @cached_property
    def bound(self) -> list[BoundStage]:
        """Each stage on its lane."""
        return bind_all(self._stages, self.lanes)

    @property
    def pinned_bytes(self) -> int:
        """Page-locked bytes that the stages hold."""
        return sum(stage.pinned_bytes for stage in self._made)

    @property
    def decode_bytes(self) -> int:
        """Bytes on the device for decoded pixels."""
        return sum(stage.decode_bytes for stage in self._made)

    @property
    def graph_bytes(self) -> int:
        """Bytes on the device for CUDA graphs."""
        return sum(stage.graph_bytes for stage in self._made)

    @property
    def _made(self) -> Sequence[BoundStage]:
        """The bound stages, or none if they have not been made."""
        made: Sequence[BoundStage] = vars(self).get("bound", ())
        return made

    @property
    def pairs(self) -> tuple[tuple[BoundStage, Stage], ...]:
        """(stage on its lane, stage as the user made it) for each stage."""
        return tuple(zip(self.bound, self._stages, strict=True))

    def __repr__(self) -> str:
        named = ", ".join(f"{name}={stage!r}" for name, stage in zip(names_of(self._stages), self._stages, strict=True))
        return f"stages=[{named}], device={self.device}"

    def _forget(self, *names: str) -> None:
        for name in names:
            vars(self).pop(name, None)
