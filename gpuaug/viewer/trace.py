"""Copies of one batch of a loader on the host, before the stages and after each stage.

A ``BoundStage`` is a stage together with its lane (CUDA stream).
"""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.devices import synchronize
from gpuaug.core.errors import ArgumentError
from gpuaug.core.packed_targets import settle_targets, unpack_targets
from gpuaug.core.rng import CallSeeds, Position
from gpuaug.core.streams import Event, Lanes
from gpuaug.loader.inspection import Inspection, restored_at_end
from gpuaug.loader.streamed_loader import StreamedLoader
from gpuaug.stages.base import BoundStage
from gpuaug.stages.feature import FeatureStage
from gpuaug.stages.selection import Selection


@dataclass(frozen=True, slots=True)
class StageTrace:
    """A stage that ran on the traced batch."""

    name: str
    selection: Selection
    transform: Any
    """The callable of a ``TransformStage``; ``None`` for other stages."""
    seed: int
    """Seed of the first call of a fused pipeline in the stage."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The first batch of the loader's next iterator, before and after each stage."""

    position: Position
    """Epoch and index of the batch, on which its random numbers depend."""
    stages: tuple[StageTrace, ...]
    """Stages that ran, in order, without stages that decode."""
    states: tuple[Batch, ...]
    """Copies of the batch on the host: as loaded, but with decoded images, then after each of ``stages``."""
    skipped_stages: tuple[str, ...]
    """Names of stages that did not run: the first feature stage and all stages after it."""


def trace_batch(loader: StreamedLoader) -> Trace:
    """Run the stages on the first batch of the next iterator, and restore the loader.

    Stages run as in a loop, up to the first feature stage, with the same random numbers.

    Raises:
        ArgumentError: If the loader has no batch.
        Exception: Any error of the wrapped loader or a stage.

    Cost:
        Loads one batch, and copies it to the host after each stage, synchronously.
    """
    inspection = Inspection(loader)
    pairs = inspection.stages  # (BoundStage, Stage) of each stage
    feature_indices = (index for index, (_, stage) in enumerate(pairs) if isinstance(stage, FeatureStage))
    num_run = next(feature_indices, len(pairs))  # number of stages before the first feature stage
    states: list[Batch] = []
    # Stages that decode have work on other threads: max_submitted > 0. They are not recorded, so the first state is the decoded
    # batch.
    stages = [bound if bound.max_submitted else _RecordedStage(bound, states, inspection.lanes) for bound, _ in pairs[:num_run]]
    with restored_at_end(loader), closing(inspection.begin(depth=0, bound_stages=stages)) as iterator:
        position = iterator.position
        consumer = inspection.lanes.consumer()  # the current stream, to which the batch is handed over
        iterator.fill(consumer)
        if not iterator.launched_batches:
            raise ArgumentError("loader must have a batch to be shown, got no batch. Check whether its dataset is empty.")
        batch = iterator.pop(consumer)
        if not states:  # no stage has run, or only stages that decode
            states.append(_on_host(batch, loader.device))
    stage_traces = [
        StageTrace(bound.name, stage.selection, getattr(stage, "transform", None), CallSeeds(position, bound.name).next())
        for bound, stage in pairs[:num_run]
        if not bound.max_submitted
    ]
    return Trace(position, tuple(stage_traces), tuple(states), tuple(bound.name for bound, _ in pairs[num_run:]))


class _RecordedStage(BoundStage):
    """Wrapper of a stage that appends host copies of the first stage's input and of each stage's output to ``states``."""

    def __init__(self, inner: BoundStage, states: list[Batch], lanes: Lanes) -> None:
        super().__init__(inner.name, inner.selection, lanes)  # the name selects the lane: that of ``inner``
        self._inner = inner
        self._states = states
        self._device = lanes.device

    def read(self, batch: Batch) -> tuple[Any, ...]:
        if not self._states:
            self._states.append(_on_host(batch, self._device))
        return self._inner.read(batch)

    def reads_pending(self, batch: Batch) -> bool:
        # The host must know the lengths of targets before every read(), because write() copies the batch to the host.
        return True

    def run(self, values: tuple[Any, ...], ready: Event, position: Position, iterator_state: dict[str, Any]) -> Any:
        return self._inner.run(values, ready, position, iterator_state)

    def write(self, batch: Batch, result: Any) -> Batch:
        new_batch = self._inner.write(batch, result)
        self._states.append(_on_host(new_batch, self._device))
        return new_batch


def _on_host(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch on ``device`` to the host. A batch on the host is copied, too: a transform may write to its input later."""
    synchronize(device)  # the batch may have been written on any lane
    batch = unpack_targets(settle_targets(batch))

    def copied(leaf: Any) -> Any:
        """Return a copy of a tensor, or of a mapping with copies of its tensors."""
        if isinstance(leaf, Tensor):
            return leaf.detach().to("cpu", copy=True)
        # A mapping with a ``to`` method, such as ``BatchEncoding``, is a leaf. Its ``to`` might return the mapping itself.
        return {key: batches.map_leaves(copied, value) for key, value in leaf.items()} if isinstance(leaf, Mapping) else leaf

    return batches.map_leaves(copied, batch)
