"""The profiler's and the viewer's access to a loader, which is restored afterwards."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentError, ArgumentTypeError
from gpuaug.core.rng import generator_lock
from gpuaug.core.streams import Lanes
from gpuaug.feed.feed import Feed
from gpuaug.feed.wrapped_loader import has_persistent_workers, parts
from gpuaug.loader.hooks import Hooks
from gpuaug.loader.iterator import PipelinedIterator
from gpuaug.loader.stats import Stats
from gpuaug.loader.streamed_loader import StreamedLoader
from gpuaug.stages.base import BoundStage, Stage


class Inspection:
    """Access to internals of a loader, for the profiler and the viewer.

    Args:
        loader: Iterators made here change its counters and its epoch. ``left_as_it_was`` restores them.
    """

    def __init__(self, loader: StreamedLoader) -> None:
        self.loader = loader
        self._shared = loader._shared

    @property
    def lanes(self) -> Lanes:
        """The lanes of the loader."""
        return self._shared.lanes

    @property
    def feed(self) -> Feed:
        """The loader's feed."""
        return self._shared.feed

    @property
    def stages(self) -> tuple[tuple[BoundStage, Stage], ...]:
        """(stage on its lane, stage as the user made it) for each stage."""
        return self._shared.placement.pairs

    def begin(self, depth: int, bound: Sequence[BoundStage] | None = None) -> PipelinedIterator:
        """Begin an iterator that works ``depth`` batches ahead, with the stages ``bound`` instead of the loader's, if given."""
        return self.loader._begin(depth, bound)

    def copy(self, host_batch: Batch) -> Batch:
        """Copy a batch to the device, on the lane that is current."""
        return self._shared.placement.copier.copy(host_batch).batch

    @contextmanager
    def watched_by(self, hooks: Hooks) -> Iterator[None]:
        """A block in which iterators call ``hooks``."""
        before, self._shared.hooks = self._shared.hooks, hooks
        try:
            yield
        finally:
            self._shared.hooks = before


def check(loader: object, doing: str, otherwise: str) -> StreamedLoader:
    """Check that ``loader`` can be profiled or shown, and restored afterwards. Returns it.

    Args:
        loader: The user's argument.
        doing: The participle in error texts, such as ``"profiled"``.
        otherwise: The way out in the error text for objects that cannot be iterated.

    Raises:
        ArgumentTypeError: If it is no ``StreamedLoader``.
        ArgumentError: If it can be read once, or an iterator would end.
    """
    if not isinstance(loader, StreamedLoader):
        way_out = "Wrap it: gpuaug.StreamedLoader(loader)." if hasattr(loader, "__iter__") else otherwise
        raise ArgumentTypeError(f"loader must be a StreamedLoader, got {type(loader).__name__}. {way_out}")
    if isinstance(loader.loader, Iterator):
        raise read_once(loader.loader)  # now, before a batch is taken that cannot be given back
    if has_persistent_workers(loader.loader) and any(feed.is_open for feed in loader._feed_iterators):
        raise ArgumentError(
            f"loader must have no iterator open on persistent workers while it is {doing}, got one, which would end. "
            "Finish its loop first, or close() the loader."
        )
    return loader


@contextmanager
def left_as_it_was(loader: StreamedLoader) -> Iterator[None]:
    """A block after which the loader's epoch, state and counters, and torch's generators, are restored."""
    shared = loader._shared
    counted = loader._shared.stats
    generators = (getattr(part, "generator", None) for part in parts(loader.loader).values())
    states = [(generator, generator.get_state()) for generator in generators if isinstance(generator, torch.Generator)]
    places = [(part, copy.deepcopy(part.state_dict())) for part in _in_this_process(loader.loader)]
    no_workers = has_persistent_workers(loader.loader) and not shared.feed.has_running_workers
    shared.stats = Stats()
    try:
        with shared.progress.set_aside(), _generators_kept(loader.device):
            yield
    finally:
        shared.stats = counted
        if no_workers:
            loader.close()  # workers draw their seeds when they start, so the user's loop must start them
        for generator, state in states:
            generator.set_state(state)
        for part, place in places:
            part.load_state_dict(place)


@contextmanager
def _generators_kept(device: torch.device) -> Iterator[None]:
    """A block after which torch's global generators, of the host and of ``device``, are restored."""
    module = None if device.type == "cpu" else getattr(torch, device.type)
    where = (device,) if device.type in ("cuda", "xpu") else ()
    with generator_lock:
        states = torch.get_rng_state(), None if module is None else module.get_rng_state(*where)
    try:
        yield
    finally:
        with generator_lock:
            torch.set_rng_state(states[0])
            if module is not None:
                module.set_rng_state(states[1], *where)


def read_once(source: object) -> ArgumentError:
    """The error for a source that can be read once."""
    return ArgumentError(
        f"loader must wrap what can be iterated again and again, got {type(source).__name__}, which can be read once. "
        "Wrap a list, a DataLoader, or an object whose __iter__ begins anew."
    )


def _in_this_process(loader: Any) -> Iterator[Any]:
    """The dataset, if it has a state of its own and is read in this process, not in workers."""
    dataset = getattr(loader, "dataset", None)
    known = all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
    if known and getattr(loader, "num_workers", 0) == 0:
        yield dataset
