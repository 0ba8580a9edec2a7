"""A loader that Accelerate has prepared: read through its ``DataLoader``, and told of each batch when that is handed over.

A prepared loader says where training is: ``accumulate`` steps and ``gather_for_metrics`` cuts the last batch by its
``end_of_dataloader``, and ``save_state`` saves its ``dl_state_dict``. Iterated ahead of training, these would be ahead too.
Its own ``iter`` also has ranks agree on the state of a generator, which a background thread must not do.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from operator import length_hint
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from gpuaug.core.errors import ArgumentError, GpuAugWarning
from gpuaug.feed.wrapped_loader import Begin, Begun, StateReader, end_workers


class Reached(NamedTuple):
    """State after a batch was read, kept until the batch is handed over."""

    state: Any
    """State of the ``DataLoader`` after the batch."""
    last: bool


class Place(NamedTuple):
    """Random-number key of the next batch. Saved with the loader's state."""

    seed: int
    epoch: int
    batch: int


_PLACE = "gpuaug"
"""Key of the ``Place`` in the state of Accelerate's loader."""


class PreparedLoader:
    """The work that Accelerate's loader does around its ``DataLoader``.

    Args:
        loader: A ``DataLoaderShard``, or in a single process a ``DataLoaderDispatcher``.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._open = 0
        self.dataloader: Any = loader.base_dataloader
        """The ``DataLoader`` that is iterated in its place."""

    @property
    def device(self) -> Any:
        """Device on which it puts batches, or ``None``."""
        return getattr(self._loader, "device", None)

    @property
    def epoch(self) -> int:
        """Epoch of its next iterator."""
        epoch: int = self._loader.iteration
        return epoch

    @property
    def skipped(self) -> tuple[int, int]:
        """(batches that its sampler leaves out, batches that it reads and drops), if it skips the first ones."""
        return getattr(self.dataloader.batch_sampler, "skip_batches", 0), self._loader.skip_batches

    def prepare(self, epoch: int) -> None:
        """Before a pass begins: have ranks agree on generators, and samplers know the epoch."""
        from accelerate.utils import synchronize_rng_states

        if getattr(self._loader, "rng_types", None) is not None:
            synchronize_rng_states(self._loader.rng_types, self._loader.synchronized_generator)
        self._loader.set_epoch(epoch)

    def open(self, begin: Begin, dataloader: Any) -> Begun:
        """Begin a pass over the ``DataLoader``, or a copy of it."""
        one_ahead = _OneAhead(*begin(dataloader))
        return one_ahead, one_ahead.reached

    def begin(self) -> None:
        """Note that the training loop has begun an iteration."""
        self._open += 1
        self._loader.begin()

    def hand_over(self, reached: Reached, place: Place) -> None:
        """Note that a batch is handed over, and the place after it."""
        self._loader.end_of_dataloader = reached.last
        if "dl_state_dict" in vars(self._loader) and isinstance(reached.state, dict):
            state = {**reached.state, "_iterator_finished": reached.last, _PLACE: tuple(place)}
            self._loader.dl_state_dict = state

    def loaded(self) -> Place | None:
        """The place in a state that Accelerate has loaded and that no pass has begun from."""
        state = getattr(self.dataloader, "next_iter_state", None)
        return Place(*state[_PLACE]) if isinstance(state, dict) and _PLACE in state else None

    def end(self, epoch: int) -> None:
        """Note that the training loop has reached the end of an epoch."""
        self._loader.iteration = epoch + 1

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """A block whose iterations are undone at its end."""
        names = ("iteration", "end_of_dataloader", "remainder", "dl_state_dict")
        before = {name: value for name, value in vars(self._loader).items() if name in names}
        try:
            yield
        finally:
            vars(self._loader).update(before)

    def leave(self) -> None:
        """Note that the training loop has left an iteration."""
        self._open -= 1
        if not self._open:
            self._loader.end()


class _OneAhead(Iterator[Any]):
    """An iterator that reads one batch ahead, so that the last batch is known as such."""

    def __init__(self, iterator: Iterator[Any], state: StateReader) -> None:
        self._iterator = iterator
        self._state = state
        self._next: tuple[Any, Any] | None = None
        self._error: BaseException | None = None
        self._begun = self._ended = False
        self._reached = Reached(state(False), last=False)
        # As a DataLoader's iterator has them.
        self._shutdown_workers = partial(end_workers, iterator)
        self._data_queue = getattr(iterator, "_data_queue", None)

    def reached(self, ended: bool) -> Reached:
        """State after the batch that was returned last, or at the end."""
        return Reached(self._state(True), last=True) if ended else self._reached

    def __next__(self) -> Any:
        if not self._begun:
            self._begun = True
            self._read()
        if self._error is not None:
            error = self._error
            self._error = None
            try:
                raise error
            finally:
                del error  # or it would hold itself through its traceback
        if self._next is None:
            raise StopIteration
        batch, state = self._next
        self._read()
        self._reached = Reached(state, self._ended)
        return batch

    def _read(self) -> None:
        self._next = None
        try:
            batch = next(self._iterator)
            self._next = batch, self._state(False)
        except StopIteration:
            self._ended = True
        except BaseException as error:  # raised in its own place, after the batch before it
            self._error = error


def as_prepared(loader: Any) -> PreparedLoader | None:
    """``loader`` as one of Accelerate's, if it is.

    Raises:
        ArgumentError: If it is one that talks to other ranks for every batch.
    """
    # Without an import: the user of such a loader has imported the module. Not isinstance(): they claim the class they hold.
    module = sys.modules.get("accelerate.data_loader")
    if module is None:
        return None
    if issubclass(type(loader), module.DataLoaderDispatcher) and loader.state.num_processes > 1:
        raise ArgumentError(
            "loader must be one that each rank reads by itself, got a DataLoaderDispatcher, which sends batches from rank 0 to "
            "the others while they train: read ahead, that could cross what the model sends. Pass "
            "dataloader_config=DataLoaderConfiguration(dispatch_batches=False) to the Accelerator."
        )
    kinds = (module.DataLoaderShard, module.DataLoaderDispatcher)
    return PreparedLoader(loader) if issubclass(type(loader), kinds) else None


def warn_if_never_stepped(loader: Any) -> None:
    """Warn where Accelerate accumulates gradients, and is not told of the end of ``loader``, which it has not prepared.

    Warns:
        GpuAugWarning: If an epoch is no whole number of windows.
    """
    module = sys.modules.get("accelerate.state")
    if module is None or not module.GradientState._shared_state or not isinstance(loader, DataLoader):
        return
    state = module.GradientState()
    if state.num_steps == 1 or not state.sync_with_dataloader or not torch.is_grad_enabled() or as_prepared(loader) is not None:
        return
    batches = length_hint(loader)
    if batches % state.num_steps:
        warnings.warn(
            f"The gradients of the last {batches % state.num_steps} of {batches} batches are not stepped, because Accelerate "
            f"accumulates gradients and has not prepared the {type(loader).__name__}. Use "
            "StreamedLoader(accelerator.prepare(dataloader), stages).",
            GpuAugWarning,
            stacklevel=5,  # the user's loop, beyond next() of the iterator and of its generator, and _begin()
        )
