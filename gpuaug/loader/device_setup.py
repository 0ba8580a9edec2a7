"""``DeviceSetup``: a loader's device, lanes (CUDA streams, one per stage) and stages. Lanes are created on first use.

A *schedule* is a stage that selects one of several stages by the epoch.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from gpuaug.cache.cached_stages import CachedStages
from gpuaug.core import devices
from gpuaug.core.errors import ArgumentError
from gpuaug.core.streams import Lanes
from gpuaug.stages.base import BoundStage, HeldBytes, Stage, as_stages, bind_all, names_of, of_epoch
from gpuaug.stages.copy import Copier
from gpuaug.stages.feature import check_device


class DeviceSetup:
    """Device, lanes and stages of one loader.

    ``cuda`` without an index means the device that is current when the first iterator begins, because frameworks may set a
    rank's device after the loader was created. If lanes were created earlier, on another device, the first iterator replaces
    them.

    Args:
        device: The user's argument ``device``.
        warn_pageable: Whether to warn about batches in pageable memory.
    """

    def __init__(self, device: torch.device | str | int | None, *, warn_pageable: bool) -> None:
        self._device = devices.as_device(device)
        self._warn_pageable = warn_pageable
        self.stages: tuple[Stage, ...] = ()
        """The user's stages, in order."""

    @property
    def device(self) -> torch.device:
        """Device that batches are copied to. Before the first iterator: the device that an iterator would now use."""
        return devices.with_index(self._device)

    def fix_device_index(self) -> None:
        """Set the index of a ``cuda`` device without an index to the current device. Called when an iterator begins."""
        self._device = self.device
        if "lanes" in vars(self) and self.lanes.device != self._device:
            self._delete_cached("lanes", "copier", "bound_stages", "cached_stages")

    @cached_property
    def lanes(self) -> Lanes:
        """Lanes on the device."""
        return Lanes(self.device)

    @cached_property
    def copier(self) -> Copier:
        """Copier of batches, on the copy lane."""
        return Copier(self.lanes.device, warn_pageable=self._warn_pageable)

    def set_stages(self, value: Sequence[Any]) -> None:
        """Replace the stages.

        Raises:
            ArgumentTypeError: If ``value`` is not a sequence of stages and callables.
            ArgumentError: If two stages have the same name.
            DeviceError: If an encoder is on another device.
        """
        new = tuple(as_stages(value))
        for stage in new:
            for stage_of_epoch in stage.by_epoch.values():
                check_device(stage_of_epoch, self._device)
        has_index = self._device == self.device  # otherwise the device of the lanes may still change
        bound_stages = bind_all(new, self.lanes) if has_index else None
        self.stages = new
        self._delete_cached("bound_stages", "cached_stages")
        if bound_stages is not None:
            self.bound_stages = bound_stages

    @cached_property
    def bound_stages(self) -> list[dict[int, BoundStage]]:
        """Per stage: first epoch → ``BoundStage``, a stage together with its lane, that runs from this epoch on."""
        return bind_all(self.stages, self.lanes)

    @cached_property
    def cached_stages(self) -> CachedStages | None:
        """Stages up to the stage whose results a feature cache stores; ``None`` without a cache.

        Raises:
            ArgumentError: If several stages have a cache.
        """
        cached = [index for index, stage in enumerate(self.stages) if stage.cache is not None]
        if len(cached) > 1:
            raise ArgumentError(
                f"One stage of a loader must have a cache, got {len(cached)}. It stores the results of the stages before it, "
                "too: put the other encoder before it, without cache=."
            )
        return CachedStages(self.stages[: cached[0] + 1], self.lanes) if cached else None

    def held_bytes(self) -> HeldBytes:
        """Return the bytes of memory that the stages hold."""
        existing: Sequence[dict[int, BoundStage]] = vars(self).get("bound_stages", ())  # does not bind the stages
        bound_stages = {id(bound): bound for by_epoch in existing for bound in by_epoch.values()}.values()  # each once
        # Sums per field. ``HeldBytes()``, all 0, is for a loader without stages.
        return HeldBytes(*map(sum, zip(HeldBytes(), *(bound.held_bytes() for bound in bound_stages), strict=True)))

    def row_counts(self) -> tuple[int, int, int, int]:
        """Return the numbers of rows of a feature cache that were read, encoded, written and dropped."""
        cached: CachedStages | None = vars(self).get("cached_stages")  # does not create them
        return (0, 0, 0, 0) if cached is None else cached.counts

    @property
    def stage_pairs(self) -> tuple[tuple[dict[int, BoundStage], Stage], ...]:
        """(first epoch → ``BoundStage``, ``Stage``) of each of the user's stages, in order, with schedules as single stages."""
        return tuple(zip(self.bound_stages, self.stages, strict=True))

    def stages_at(self, epoch: int) -> tuple[tuple[BoundStage, Stage], ...]:
        """Return (``BoundStage``, ``Stage``) of each stage that runs in an epoch, in order."""
        pairs = tuple((of_epoch(bound, epoch), of_epoch(stage.by_epoch, epoch)) for bound, stage in self.stage_pairs)
        for bound, _ in pairs:
            bound.other_selections = [stage.selection for other, stage in pairs if other is not bound]
        return pairs

    def __repr__(self) -> str:
        stages = ", ".join(f"{name}={stage!r}" for name, stage in zip(names_of(self.stages), self.stages, strict=True))
        return f"stages=[{stages}], device={self.device}"

    def _delete_cached(self, *properties: str) -> None:
        """Delete the values of cached properties, so that they are computed again on next use."""
        for name in properties:
            vars(self).pop(name, None)
