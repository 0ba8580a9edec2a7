"""Device of a loader, with its lanes and its stages, created when they are first needed."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from gpuaug.core import devices
from gpuaug.core.streams import Lanes
from gpuaug.stages.base import BoundStage, Stage, as_stages, bind_all, names_of
from gpuaug.stages.copy import Copier
from gpuaug.stages.feature import check_device


class DeviceSetup:
    """Device of one loader, with its lanes and its stages.

    ``cuda`` without an index means the device that is current when the first iterator begins: frameworks may set a rank's
    device after the loader was created. Until then lanes are created only if they are asked for, and created again if another
    device has become current.

    Args:
        device: The user's argument.
        warns: Whether to warn about batches in pageable memory.
    """

    def __init__(self, device: torch.device | str | int | None, *, warns: bool) -> None:
        self._device = devices.requested(device)
        self._warns = warns
        self._stages: tuple[Stage, ...] = ()

    @property
    def device(self) -> torch.device:
        """Device that batches are copied to. Before the first iterator: the device if the iterator began now."""
        return devices.with_index(self._device)

    def settle(self) -> None:
        """Fix the index of the device to the current one. Called when an iterator begins."""
        if self._device != (current := self.device):
            if "lanes" in vars(self) and self.lanes.device != current:
                self._forget("lanes", "copier", "bound")
            self._device = current

    @cached_property
    def lanes(self) -> Lanes:
        """Lanes on the device."""
        return Lanes(self.device)

    @cached_property
    def copier(self) -> Copier:
        """Copier of batches, on the copy lane."""
        return Copier(self.lanes.device, warns=self._warns)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The user's stages, in order."""
        return self._stages

    @stages.setter
    def stages(self, value: Sequence[Any]) -> None:
        """Replace the stages.

        Raises:
            ArgumentTypeError: If ``value`` is not a sequence of stages and callables.
            ArgumentError: If two stages have the same name.
            DeviceError: If an encoder is on another device.
        """
        new = tuple(as_stages(value))
        for stage in new:
            check_device(stage, self._device)
        bound = None if self._device != self.device else bind_all(new, self.lanes)
        self._stages = new
        self._forget("bound")
        if bound is not None:
            self.bound = bound

    @cached_property
    def bound(self) -> list[BoundStage]:
        """Stages, bound to their lanes."""
        return bind_all(self._stages, self.lanes)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of page-locked memory that the stages hold."""
        return sum(stage.pinned_bytes for stage in self._existing_bound)

    @property
    def decode_bytes(self) -> int:
        """Bytes of device memory that the stages hold for decoded pixels."""
        return sum(stage.decode_bytes for stage in self._existing_bound)

    @property
    def graph_bytes(self) -> int:
        """Bytes of device memory that the stages hold for CUDA graphs."""
        return sum(stage.graph_bytes for stage in self._existing_bound)

    @property
    def _existing_bound(self) -> Sequence[BoundStage]:
        """``bound``, or an empty sequence if it has not been created."""
        bound: Sequence[BoundStage] = vars(self).get("bound", ())
        return bound

    @property
    def pairs(self) -> tuple[tuple[BoundStage, Stage], ...]:
        """(stage bound to its lane, the user's stage) for each stage."""
        return tuple(zip(self.bound, self._stages, strict=True))

    def __repr__(self) -> str:
        stages = ", ".join(f"{name}={stage!r}" for name, stage in zip(names_of(self._stages), self._stages, strict=True))
        return f"stages=[{stages}], device={self.device}"

    def _forget(self, *names: str) -> None:
        for name in names:
            vars(self).pop(name, None)
