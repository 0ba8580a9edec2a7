"""``Inspection``: access to the internals of a loader, for the profiler and the viewer, which restore the loader afterwards."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentError, ArgumentTypeError
from gpuaug.core.rng import generator_lock
from gpuaug.core.streams import Lanes
from gpuaug.feed.draws_ahead import Variable, generator_variables, read_open_to_end
from gpuaug.feed.wrapped_loader import has_persistent_workers, has_state_methods, parts
from gpuaug.loader.hooks import Hooks
from gpuaug.loader.iterator import PipelinedIterator
from gpuaug.loader.stats import Stats
from gpuaug.loader.streamed_loader import StreamedLoader
from gpuaug.stages.base import BoundStage, Stage


class Inspection:
    """Access to the internals of a loader, for the profiler and the viewer.

    Args:
        loader: The loader. Iterators of ``begin`` change its counters and epoch, which ``restored_at_end`` restores. All of
            them run the stages of the epoch of the loader's next iterator, also if their own epochs are later.
    """

    def __init__(self, loader: StreamedLoader) -> None:
        self.loader = loader
        self._shared = loader._shared
        self.feed = self._shared.feed
        """Feed of the loader: transfer of batches from the wrapped loader to the copy lane."""
        self._epoch = self._shared.progress.next_epoch

    @property
    def lanes(self) -> Lanes:
        """Lanes (CUDA streams) of the loader."""
        return self._shared.lanes

    @property
    def stages(self) -> tuple[tuple[BoundStage, Stage], ...]:
        """(``BoundStage``, ``Stage``) of each stage, in order. A ``BoundStage`` is a stage together with its lane."""
        return self._shared.device_setup.stages_at(self._epoch)

    def begin(self, depth: int, bound_stages: Sequence[BoundStage] | None = None) -> PipelinedIterator:
        """Begin an iterator.

        Args:
            depth: Maximum number of batches that are launched ahead of the training loop.
            bound_stages: Stages to run; ``None``: ``stages``.
        """
        self._shared.device_setup.fix_device_index()  # before the stages are bound to lanes
        return self.loader._begin(depth, [bound for bound, _ in self.stages] if bound_stages is None else bound_stages)

    def copy(self, host_batch: Batch) -> Batch:
        """Queue the copy of a batch to the device on the current lane. Lists of target dicts may become ``PackedTargets``."""
        return self._shared.device_setup.copier.copy(host_batch).batch

    @contextmanager
    def with_hooks(self, hooks: Hooks) -> Iterator[None]:
        """Context manager in which iterators of the loader call ``hooks``."""
        previous_hooks = self._shared.hooks
        self._shared.hooks = hooks
        try:
            yield
        finally:
            self._shared.hooks = previous_hooks


def checked_loader(loader: object, use: str, advice: str) -> StreamedLoader:
    """Check that ``loader`` can be profiled or shown, and restored afterwards. Return ``loader``.

    Args:
        loader: The user's argument.
        use: Participle for error messages: ``"profiled"`` or ``"shown"``.
        advice: Last sentence of the error message about an object that cannot be iterated.

    Raises:
        ArgumentTypeError: If ``loader`` is not a ``StreamedLoader``.
        ArgumentError: If the wrapped loader can be iterated only once, or if an open iterator would end.
    """
    if not isinstance(loader, StreamedLoader):
        way_out = "Wrap it: gpuaug.StreamedLoader(loader)." if hasattr(loader, "__iter__") else advice
        raise ArgumentTypeError(f"loader must be a StreamedLoader, got {type(loader).__name__}. {way_out}")
    if isinstance(loader.loader, Iterator):
        raise single_pass_error(loader.loader)  # before a batch is read, because it would be lost to the user's loop
    if has_persistent_workers(loader.loader) and any(feed.end_message is None for feed in loader._feed_iterators):
        raise ArgumentError(
            f"loader must have no iterator open on persistent workers while it is {use}, got an open one, which would end. "
            "Finish its loop first, or close() the loader."
        )
    return loader


@contextmanager
def restored_at_end(loader: StreamedLoader) -> Iterator[None]:
    """Context manager that restores a loader and generators at its end.

    It restores the epoch, the state and the counters of the loader, torch's global generators, and generators that are
    attributes of the wrapped loader, its samplers and its dataset.
    """
    shared = loader._shared
    stats = shared.stats
    variables = generator_variables(parts(loader.loader).values())
    read_open_to_end(variables)  # otherwise open iterations would go on drawing from the generators meanwhile
    with generator_lock:  # within a stage of another thread, the global generators have the states of the stage
        generator_states = [(variable, variable.get()) for variable in [*variables, *_global_generators(loader.device)]]
    dataset: Any = getattr(loader.loader, "dataset", None)
    # Without workers, the iterators change the state of the dataset in this process.
    is_read_here = has_state_methods(dataset) and getattr(loader.loader, "num_workers", 0) == 0
    dataset_state = copy.deepcopy(dataset.state_dict()) if is_read_here else None
    stop_workers = has_persistent_workers(loader.loader) and not shared.feed.has_running_workers
    shared.stats = Stats()
    try:
        with shared.progress.restored_at_end():
            yield
    finally:
        shared.stats = stats
        if stop_workers:
            loader.close()  # workers draw their seeds when they start, so the user's loop must start new workers
        with generator_lock:
            for variable, state in generator_states:
                variable.set(state)
        if is_read_here:
            dataset.load_state_dict(dataset_state)


def _global_generators(device: torch.device) -> list[Variable]:
    """Return access to the states of torch's global generators, of the host and of ``device``."""
    variables = [Variable(torch.default_generator, torch.get_rng_state, torch.set_rng_state)]
    if device.type != "cpu":
        module = getattr(torch, device.type)
        options = {"device": device} if device.type in ("cuda", "xpu") else {}
        get_and_set = (partial(function, **options) for function in (module.get_rng_state, module.set_rng_state))
        variables.append(Variable(device, *get_and_set))
    return variables


def single_pass_error(source: object) -> ArgumentError:
    """Return the error about a wrapped loader that can be iterated only once."""
    return ArgumentError(
        f"loader must wrap an iterable that can be iterated repeatedly, got {type(source).__name__}, which can be read once. "
        "Wrap a list, a DataLoader, or an object whose __iter__ returns a new iterator."
    )
