"""Times of the *parts* of the work on a batch, each measured alone: the copy, each stage and the training step.

A part runs on its *lane*, a CUDA stream of the loader. *Eager* means without a CUDA graph. A ``Work`` is a function that queues
the work of one batch on the device. A ``BoundStage`` is a stage together with its lane.
"""

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Literal

import torch

from gpuaug.core.batch import Batch
from gpuaug.core.devices import synchronize
from gpuaug.core.packed_targets import settle_targets
from gpuaug.core.rng import Position
from gpuaug.core.streams import Lanes
from gpuaug.decode.stage import BoundDecode, DecodeStage
from gpuaug.fusion.fuse import Fused
from gpuaug.loader.inspection import Inspection
from gpuaug.profiler.measure import Work, can_trace, time_alone, trace_device_work, waits_at
from gpuaug.profiler.report import COPY, DECODERS, SLOWER_THAN_ENGINES, STEP, Part
from gpuaug.profiler.steady_state import RepeatedBatch
from gpuaug.stages.base import BoundStage, Stage, TransformStage
from gpuaug.stages.feature import FeatureStage

REPEATS = 10
"""Number of measured calls per part. The median is reported."""


def measure_parts(inspection: Inspection, host_batch: Batch, step: Work) -> Iterator[Part]:
    """Measure the parts in the order of the work. The input of a part is the result of the previous part.

    Args:
        inspection: Access to the loader whose copy and stages are measured.
        host_batch: A batch on the host, page-locked if batches of the wrapped loader are page-locked.
        step: One training step, on a batch that is on the device.
    """
    loader = inspection.loader
    device = loader.device
    lanes = inspection.lanes
    consumer = lanes.consumer()

    def on_lane(work: Work) -> Work:
        """Return a function that calls ``work``, which may make a lane current, and then restores the current stream."""

        def run() -> Any:
            with lanes.launching(consumer):
                return work()

        return run

    def stage_work(bound: BoundStage, repeated: RepeatedBatch) -> Work:
        return on_lane(partial(_run, bound, repeated, _positions(loader.seed), {}))

    repeated_decoding = _RepeatedDecoding(inspection, host_batch, _positions(loader.seed))
    with closing(repeated_decoding):
        for index, (bound, stage) in enumerate(inspection.stages):
            if isinstance(stage, DecodeStage):
                assert isinstance(bound, BoundDecode)
                yield _decoding_part(bound, on_lane(partial(repeated_decoding.next, index)), device)
        host_batch = on_lane(repeated_decoding.whole_images)()

    def copy_batch() -> Batch:
        lanes.copy.make_current()
        return inspection.copy(host_batch)

    copy_work = on_lane(copy_batch)
    measure = partial(_part, device=device, tracing=can_trace(device))
    yield measure(COPY, copy_work)
    batch = copy_work()
    synchronize(device)
    for bound, stage in inspection.stages:
        if isinstance(stage, DecodeStage):  # measured above
            continue
        repeated = RepeatedBatch(bound.read(batch))
        work = stage_work(bound, repeated)
        for _ in range(3):  # a CUDA graph is captured when a shape occurs for the second time
            result = work()
        synchronize(device)
        fields: dict[str, Any] = {"kind": _kind(stage), "runs": _transform_name(stage), "has_cache": stage.cache is not None}
        part = measure(f"stage/{bound.name}", work, **fields)
        # in_line: the device has no CUDA streams, and therefore no CUDA graphs.
        if isinstance(stage, FeatureStage) and stage.captures and not lanes.in_line:
            if bound.encoder_runs["replayed"]:  # otherwise ``part`` was measured without a graph
                eager = stage_work(_bound_without_graphs(stage, bound.name, lanes), repeated)
                part = replace(part, eager=measure(part.name, eager, kind="eager encoder"))
            else:
                part = replace(part, kind="eager encoder")
        bound.encoder_runs.clear()  # measurements are not counted in stats()
        yield part
        batch = settle_targets(bound.write(batch, result))
    yield measure(STEP, step)


class _RepeatedDecoding:
    """Repeated decoding of one batch. As in the loader, several batches are being decoded at the same time."""

    def __init__(self, inspection: Inspection, host_batch: Batch, positions: Iterator[Position]) -> None:
        self._lanes = inspection.lanes
        self._batch = host_batch
        self._stages = [bound for bound, _ in inspection.stages]
        self._iterator_state: dict[str, Any] = {}
        self._positions = positions
        self._submitted: deque[tuple[Batch, Any]] = deque()

    def next(self, stage_index: int) -> None:
        """Submit the batch to the stage at ``stage_index``, then wait for the oldest submitted batch."""
        self._lanes.copy.make_current()
        while len(self._submitted) <= BoundDecode.max_submitted:  # as many batches as the loader submits ahead
            stage = self._stages[stage_index]
            self._submitted.append(stage.submit(self._batch, self._iterator_state, next(self._positions), self._stages))
        batch, work = self._submitted.popleft()
        work.collect(batch)

    def whole_images(self) -> Batch:
        """Decode the batch without windows (parts of images), so that later stages can run on it at any position."""
        self._lanes.copy.make_current()
        batch = self._batch
        for bound in self._stages:
            # Without later stages, (), there is no crop for which a window would suffice.
            batch, work = bound.submit(batch, self._iterator_state, Position(0, 0, 0, 0), ())
            batch = batch if work is None else work.collect(batch)
        return batch

    def close(self) -> None:
        """Wait for submitted batches, and end the threads."""
        for _, work in self._submitted:
            work.abandon()
        self._submitted.clear()
        for bound in self._stages:
            bound.close(self._iterator_state)


def _decoding_part(bound: BoundDecode, work: Work, device: torch.device) -> Part:
    """Measure a decoding stage. The kind of the part follows from the decoder that the stage waited for longest."""
    decoder = bound.decoder
    decoder.waited_s.clear()
    wall, _ = time_alone(work, device, REPEATS)
    names = [file_decoder.name for file_decoder in decoder.all_decoders]
    slowest = max(names, key=lambda name: decoder.waited_s[name])
    kind = SLOWER_THAN_ENGINES if "engines" in names and slowest in ("hybrid", "cpu") else DECODERS[slowest]
    return Part(f"stage/{bound.name}", wall, kind=kind)


def _part(name: str, work: Work, *, device: torch.device, tracing: bool, **fields: Any) -> Part:
    """Measure ``work`` alone: wall time, time of the host and of the device, and the line where the host waits for the device.

    Args:
        name: Name of the part.
        work: Function that queues the work of one batch.
        device: Device of the work.
        tracing: Whether the device's time can be traced.
        fields: Further fields of ``Part``.
    """
    wall, host = time_alone(work, device, REPEATS)
    traced = trace_device_work(work, device) if tracing else None
    sync_line = None if name == COPY else waits_at(work, device)
    if traced is not None:
        return Part(name, wall, host, traced.busy_ms, traced.launches, sync_line, **fields)
    if device.type == "cuda":  # without a trace, the wall time is used, an upper bound of the device's time
        return Part(name, wall, host, wall.median, None, sync_line, **fields)
    return Part(name, wall, wall, waits_at=sync_line, **fields)


def _run(bound: BoundStage, repeated: RepeatedBatch, positions: Iterator[Position], iterator_state: dict[str, Any]) -> Any:
    """Run a stage on its lane, with the values of ``repeated`` as input, at the next position. Return the stage's result."""
    bound.lane.make_current()
    values = repeated()
    return bound.run(values, bound.lane.record_event(), next(positions), iterator_state)


def _positions(seed: int) -> Iterator[Position]:
    """Return the positions of consecutive batches, without end. At each position, a stage draws other random numbers."""
    return map(partial(Position, seed, 0, 0), count())


def _bound_without_graphs(stage: FeatureStage, name: str, lanes: Lanes) -> BoundStage:
    """Return the stage, bound to the same lane, without CUDA graphs."""
    eager_stage = copy.copy(stage)
    eager_stage.captures = False
    return eager_stage.bind(name, lanes)


def _kind(stage: Stage) -> Literal["", "fused", "kornia", "captured", "eager encoder"]:
    """Return the kind of a part for the report, on which its advice depends; an empty string for other stages."""
    if isinstance(stage, FeatureStage):
        return "captured" if stage.captures else "eager encoder"
    transform = stage.transform if isinstance(stage, TransformStage) else stage
    if isinstance(transform, Fused):
        return "fused"
    modules = transform.modules() if isinstance(transform, torch.nn.Module) else ()
    return "kornia" if any(type(module).__module__.startswith("kornia.") for module in modules) else ""


def _transform_name(stage: Stage) -> str:
    """Return the name of the transform of a stage; an empty string if the user has named the stage."""
    transform = stage.transform if isinstance(stage, TransformStage) and stage.name is None else None
    name = getattr(transform, "__name__", type(transform).__name__)
    return "" if transform is None or name == "<lambda>" else name
