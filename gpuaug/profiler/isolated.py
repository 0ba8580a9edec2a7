"""Times of the parts of the work on a batch, each measured alone: the copy, every stage, and the training step."""

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from gpuaug.core.batch import Batch
from gpuaug.core.rng import Position
from gpuaug.core.streams import Lanes
from gpuaug.decode.stage import BoundDecode, DecodeStage
from gpuaug.fusion.fuse import Fused
from gpuaug.loader.inspection import Inspection
from gpuaug.loader.streamed_loader import StreamedLoader
from gpuaug.profiler.measure import Work, alone, can_look, on_device, synchronize, waits_at
from gpuaug.profiler.repeated_batch import RepeatedBatch
from gpuaug.profiler.report import BESIDE_ENGINES, COPY, DECODERS, STEP, Part
from gpuaug.stages.base import BoundStage, Stage, TransformStage
from gpuaug.stages.feature import FeatureStage

REPEATS = 10
"""Calls of a part. The median is reported."""


def measured(loader: StreamedLoader, host_batch: Batch, step: Work) -> Iterator[Part]:
    """Measure the parts in the order of the work, each on the result of the one before.

    Args:
        loader: The loader whose copy and stages are measured.
        host_batch: A batch in memory like that of the wrapped loader's batches.
        step: One step of training, on a batch that is on the device.
    """
    inspection = Inspection(loader)
    device = loader.device
    lanes = inspection.lanes
    consumer = lanes.consumer()

    def on_lane(work: Work) -> Work:
        def run() -> Any:
            with lanes.launching(consumer):
                return work()

        return run

    decoded = _Decoded(inspection, host_batch, _positions(loader.seed))
    with closing(decoded):
        for number, (bound, stage) in enumerate(inspection.stages):
            if isinstance(stage, DecodeStage):
                assert isinstance(bound, BoundDecode)
                yield _decoding(bound, on_lane(partial(decoded.next, number)), device)
        host_batch = on_lane(decoded.whole)()

    def copied() -> Batch:
        lanes.copy.make_current()
        return inspection.copy(host_batch)

    copying, looks = on_lane(copied), can_look(device)
    yield _part(COPY, copying, device, looks)
    batch = copying()
    synchronize(device)
    for bound, stage in inspection.stages:
        if isinstance(stage, DecodeStage):
            continue
        values = bound.read(batch)
        again = RepeatedBatch(values)
        work = on_lane(partial(_run, bound, again, _positions(loader.seed), {}))
        for _ in range(3):  # a graph is captured when a shape occurs again
            result = work()
        synchronize(device)
        part = _part(f"stage/{bound.name}", work, device, looks, kind=_kind(stage), runs=_runs(stage))
        if isinstance(stage, FeatureStage) and stage.captures and not lanes.in_line:
            if bound.encoder_runs().replayed:
                eager = on_lane(partial(_run, _eager(stage, bound.name, lanes), again, _positions(loader.seed), {}))
                part = replace(part, eager=_part(part.name, eager, device, looks, kind="eager encoder"))
            else:
                part = replace(part, kind="eager encoder")
        bound.encoder_runs()  # these are not counted
        yield part
        batch = bound.write(batch, result)
    yield _part(STEP, step, device, looks)


class _Decoded:
    """Decodes one batch repeatedly, as the loader does: the next ones are submitted before the oldest is waited for."""

    def __init__(self, inspection: Inspection, host_batch: Batch, positions: Iterator[Position]) -> None:
        self._lanes, self._batch = inspection.lanes, host_batch
        self._stages = [bound for bound, _ in inspection.stages]
        self._memory: dict[str, Any] = {}
        self._positions = positions
        self._begun: deque[tuple[Batch, Any]] = deque()

    def next(self, number: int) -> None:
        """Submit the batch to stage ``number``, then wait for the oldest submitted one."""
        self._lanes.copy.make_current()
        while len(self._begun) <= BoundDecode.ahead:
            self._begun.append(self._stages[number].submit(self._batch, self._memory, next(self._positions), self._stages))
        batch, pending = self._begun.popleft()
        pending.collect(batch)

    def whole(self) -> Batch:
        """The host batch, with all encoded images decoded whole: later stages run on it at any position."""
        self._lanes.copy.make_current()
        batch = self._batch
        for bound in self._stages:
            batch, pending = bound.submit(batch, self._memory, Position(0, 0, 0, 0), ())
            batch = batch if pending is None else pending.collect(batch)
        return batch

    def close(self) -> None:
        """Wait for submitted batches, and end the threads."""
        for _, pending in self._begun:
            pending.abandon()
        self._begun.clear()
        for bound in self._stages:
            bound.close(self._memory)


def _decoding(bound: BoundDecode, work: Work, device: torch.device) -> Part:
    decoder = bound.decoder
    decoder.waited_s.clear()
    wall, _ = alone(work, device, REPEATS)
    used = [each.name for each in decoder.all_decoders]
    longest = max(used, key=lambda name: decoder.waited_s[name])
    kind = BESIDE_ENGINES if "engines" in used and longest in ("hybrid", "cpu") else DECODERS[longest]
    return Part(f"stage/{bound.name}", wall, kind=kind)


def _part(name: str, work: Work, device: torch.device, looks: bool, **known: Any) -> Part:
    wall, host = alone(work, device, REPEATS)
    did = on_device(work, device) if looks else None
    where = None if name == COPY else waits_at(work, device)
    if did is not None:
        return Part(name, wall, host, did.busy_ms, did.launches, where, **known)
    if device.type == "cuda":  # what it takes from one to the next is what the device needs, or less than that
        return Part(name, wall, host, wall.median, None, where, **known)
    return Part(name, wall, wall, waits_at=where, **known)


def _run(bound: BoundStage, again: RepeatedBatch, positions: Iterator[Position], memory: dict[str, Any]) -> Any:
    bound.lane.make_current()
    values = again()
    return bound.run(values, bound.lane.record_event(), next(positions), memory)


def _positions(seed: int) -> Iterator[Position]:
    at = Position(seed, 0, 0, 0)
    while True:
        yield at
        at = at.after()


def _eager(stage: FeatureStage, name: str, lanes: Lanes) -> BoundStage:
    """The stage on the same lane, without graphs."""
    twin = copy.copy(stage)
    twin.captures = False
    return twin.bind(name, lanes)


def _kind(stage: Stage) -> Literal["", "fused", "kornia", "captured", "eager encoder"]:
    if isinstance(stage, FeatureStage):
        return "captured" if stage.captures else "eager encoder"
    transform = stage.transform if isinstance(stage, TransformStage) else stage
    if isinstance(transform, Fused):
        return "fused"
    modules = transform.modules() if isinstance(transform, torch.nn.Module) else ()
    return "kornia" if any(type(module).__module__.startswith("kornia.") for module in modules) else ""


def _runs(stage: Stage) -> str:
    transform = stage.transform if isinstance(stage, TransformStage) and stage.name is None else None
    name = getattr(transform, "__name__", type(transform).__name__)
    return "" if transform is None or name == "<lambda>" else name
