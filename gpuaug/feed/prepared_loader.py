"""*Prepared* loaders: results of ``accelerator.prepare`` (Hugging Face Accelerate), which wrap a ``DataLoader``.

Accelerate reads the position of training from attributes of the prepared loader: ``accumulate`` and ``gather_for_metrics`` read
``end_of_dataloader``, and ``save_state`` saves ``dl_state_dict``. Iterating the prepared loader would set the attributes when a
batch is read, which is ahead of training. It would also synchronise a generator among ranks, which a background thread must not
do. So the wrapped ``DataLoader`` is iterated instead, and the attributes are set when a batch is *handed over*: returned to the
training loop.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from operator import length_hint
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from gpuaug.core.errors import ArgumentError, warn
from gpuaug.feed.wrapped_loader import BeginFunction, IteratorAndReader, OuterIterator, StateReader


class ReadState(NamedTuple):
    """State of the ``DataLoader`` after a batch was read, stored until the batch is handed over."""

    state: Any
    """State of the ``DataLoader`` after the batch."""
    is_last: bool
    """Whether the batch is the last of the epoch."""
    next_state: Any
    """State that Accelerate saves: ``state``, or the state at the end of the epoch after the last batch."""


_POSITION_KEY = "gpuaug"
"""Key of the seed, the epoch and the index of the next batch in the state of Accelerate's loader."""


class PreparedLoader:
    """Access to a prepared loader: its attributes, and the calls that its ``__iter__`` makes besides reading batches.

    Args:
        loader: A ``DataLoaderShard``, or in a single process a ``DataLoaderDispatcher``.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._open_iterations = 0
        self.dataloader: Any = loader.base_dataloader
        """The ``DataLoader`` that is iterated instead of Accelerate's loader."""

    @property
    def device(self) -> Any:
        """Device to which Accelerate's loader copies batches, or ``None``."""
        return getattr(self._loader, "device", None)

    @property
    def epoch(self) -> int:
        """Epoch of the next iterator."""
        epoch: int = self._loader.iteration
        return epoch

    @property
    def skipped(self) -> tuple[int, int]:
        """Numbers of batches at the beginning of an iteration: (skipped by the sampler, read and dropped)."""
        return getattr(self.dataloader.batch_sampler, "skip_batches", 0), self._loader.skip_batches

    def prepare(self, epoch: int) -> None:
        """Synchronise generators among ranks, and set the epoch of samplers. Call before an iteration begins."""
        from accelerate.utils import synchronize_rng_states

        if getattr(self._loader, "rng_types", None) is not None:
            synchronize_rng_states(self._loader.rng_types, self._loader.synchronized_generator)
        self._loader.set_epoch(epoch)

    def open(self, begin: BeginFunction, dataloader: Any) -> IteratorAndReader:
        """Begin an iteration over the ``DataLoader``, or over a copy of it."""
        iterator = _ReadAheadIterator(*begin(dataloader))
        return iterator, iterator.read_state

    def begin(self) -> None:
        """Record that the training loop has begun an iteration."""
        self._open_iterations += 1
        self._loader.begin()

    def hand_over(self, read_state: ReadState, next_position: dict[str, int]) -> None:
        """Set the attributes of Accelerate's loader for a batch that is handed over.

        Args:
            read_state: State after the batch.
            next_position: Seed, epoch and index of the next batch.
        """
        self._loader.end_of_dataloader = read_state.is_last
        if "dl_state_dict" in vars(self._loader) and isinstance(read_state.next_state, dict):
            state = {
                **read_state.next_state,
                "_iterator_finished": read_state.is_last,
                _POSITION_KEY: tuple(next_position.values()),
            }
            self._loader.dl_state_dict = state

    def loaded_position(self) -> dict[str, int] | None:
        """Return the position in a state that Accelerate has loaded, if no iteration has begun from it yet; else ``None``."""
        state = getattr(self.dataloader, "next_iter_state", None)
        values = state.get(_POSITION_KEY) if isinstance(state, dict) else None
        return None if values is None else dict(zip(("seed", "epoch", "batch"), values, strict=True))

    def end(self, epoch: int) -> None:
        """Record that the training loop has reached the end of an epoch."""
        self._loader.iteration = epoch + 1

    @contextmanager
    def restored_at_end(self) -> Iterator[None]:
        """Context manager that restores the attributes of Accelerate's loader at its end."""
        names = ("iteration", "end_of_dataloader", "remainder", "dl_state_dict")
        saved = {name: value for name, value in vars(self._loader).items() if name in names}
        try:
            yield
        finally:
            vars(self._loader).update(saved)

    def leave(self) -> None:
        """Record that the training loop has ended an iteration."""
        self._open_iterations -= 1
        if not self._open_iterations:
            self._loader.end()


class _ReadAheadIterator(OuterIterator):
    """Iterator that reads one batch ahead, to find out whether a batch is the last."""

    def __init__(self, iterator: Iterator[Any], read_inner_state: StateReader) -> None:
        super().__init__(iterator, iterator)
        self._read_inner_state = read_inner_state
        self._next: tuple[Any, Any] | None = None
        """(batch, state after the batch) that was read ahead; ``None`` at the beginning and at the end."""
        self._errors: list[BaseException] = []
        """Error of reading ahead, if any, to be raised by the next call of ``next``."""
        state = read_inner_state(None)
        self._last_state = ReadState(state, False, state)

    def read_state(self, ended: bool | None) -> ReadState:
        """Return the state after the batch that ``next`` returned last, or at the end."""
        if not ended:
            return self._last_state
        state = self._read_inner_state(True)
        return ReadState(state, True, state)

    def __next__(self) -> Any:
        if self._errors:
            raise self._errors.pop()  # from no variable: a reference cycle through the traceback would keep the error alive
        batch, state = self._next or self._read()
        self._next = None
        self._last_state = ReadState(state, False, state)
        try:
            self._next = self._read()
        except StopIteration:
            self._batches = iter(())  # the inner iterator may begin again if it is read after its end
            self._last_state = ReadState(state, True, self._read_inner_state(True))
        except BaseException as error:  # raised by the following call of next(), after this batch was returned
            self._errors.append(error)
        return batch

    def _read(self) -> tuple[Any, Any]:
        """Return the next batch of the inner iterator, and the state after it."""
        return super().__next__(), self._read_inner_state(False)


def as_prepared(loader: Any) -> PreparedLoader | None:
    """Return a ``PreparedLoader`` if Accelerate has prepared ``loader``; else ``None``.

    Raises:
        ArgumentError: If ``loader`` communicates with other ranks for every batch.
    """
    # Not imported here: a prepared loader exists only if accelerate.data_loader has been imported. Not isinstance(loader, …),
    # because ``__class__`` of Accelerate's loaders is the class of the wrapped DataLoader.
    module = sys.modules.get("accelerate.data_loader")
    if module is None:
        return None
    if issubclass(type(loader), module.DataLoaderDispatcher) and loader.state.num_processes > 1:
        raise ArgumentError(
            "loader must be a loader that each rank reads by itself, got a DataLoaderDispatcher. It sends batches from rank 0 "
            "to other ranks, and if batches are read ahead, this may mix with the communication of the model. Pass "
            "dataloader_config=DataLoaderConfiguration(dispatch_batches=False) to the Accelerator."
        )
    classes = (module.DataLoaderShard, module.DataLoaderDispatcher)
    return PreparedLoader(loader) if issubclass(type(loader), classes) else None


def warn_if_not_prepared(loader: Any) -> None:
    """Warn if Accelerate accumulates gradients over ``loader`` without having prepared it.

    Warns:
        GpuAugWarning: If the number of batches of an epoch is not a multiple of the number of accumulation steps.
    """
    module = sys.modules.get("accelerate.state")
    if module is None or not module.GradientState._shared_state or not isinstance(loader, DataLoader):
        return
    state = module.GradientState()
    if state.num_steps == 1 or not state.sync_with_dataloader or not torch.is_grad_enabled() or as_prepared(loader) is not None:
        return
    batches = length_hint(loader)
    if batches % state.num_steps:
        warn(
            f"The optimizer makes no step for the last {batches % state.num_steps} of {batches} batches, because Accelerate "
            f"accumulates gradients and has not prepared the {type(loader).__name__}. Use "
            "StreamedLoader(accelerator.prepare(dataloader), stages)."
        )
