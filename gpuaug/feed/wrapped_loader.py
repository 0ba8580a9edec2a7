"""Access to the wrapped loader: its state, epoch, worker processes and errors."""

import copy
import operator
import pickle
import queue
import select
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from gpuaug.core.errors import ArgumentTypeError, add_note

_SENT_BY_NO_WORKER = (None, None)
"""(index, data) of no batch. A ``DataLoader`` that awaits a batch fails on it, and ignores it otherwise."""


_ENCODED = "files that are read but not decoded take collate_fn=gpuaug.collate_encoded"
_NOT_COLLATED = {
    "found <class 'PIL.": "images of PIL's take v2.PILToTensor() in the dataset, or collate_fn=gpuaug.collate_ragged",
    "found <class 'gpuaug.core.": "batches that are collated already take batch_size=None",
    "found <class 'gpuaug.": _ENCODED,
    "found <class 'pathlib": _ENCODED,
    "stack expects each tensor to be equal size": "images of several sizes, and target dicts, take "
    "collate_fn=gpuaug.collate_ragged",
}
"""What ``default_collate`` says of images, and the way out."""


def checked(loader: Any) -> Any:
    """``loader``, if batches can be read from it.

    Raises:
        ArgumentTypeError: If not, or if it is a dataset, which gives samples.
    """
    iterates = callable(getattr(type(loader), "__iter__", None))
    refused = isinstance(loader, str | bytes | Mapping) or getattr(loader, "ndim", 1) == 0
    if refused or not (iterates or hasattr(type(loader), "__getitem__")):
        raise ArgumentTypeError(
            f"loader must be an iterable of batches, got {type(loader).__name__}. Pass a DataLoader, a list or a generator."
        )
    if isinstance(loader, Dataset) and not iterates:
        raise ArgumentTypeError(
            f"loader must be an iterable of batches, got the dataset {type(loader).__name__}. Pass DataLoader(dataset, "
            "batch_size=…), with batch_size=None if what it gives are batches."
        )
    return loader


def explain(error: BaseException) -> None:
    """Add a note to an error of ``default_collate`` for which gpuaug has a way out."""
    if type(error) not in (TypeError, RuntimeError):
        return
    for found, way_out in _NOT_COLLATED.items():
        if found in str(error):
            add_note(error, f"gpuaug: the DataLoader could not stack these samples: {way_out}.")
            return


def has_persistent_workers(loader: Any) -> bool:
    """Whether ``loader`` is a ``DataLoader`` that keeps its workers, and its one iterator, from epoch to epoch."""
    return bool(getattr(loader, "persistent_workers", False)) and hasattr(loader, "_iterator")


def without_workers(loader: Any) -> Any:
    """``loader``, or a copy without the running workers of a ``DataLoader``, which can be pickled."""
    if getattr(loader, "_iterator", None) is None or not isinstance(loader, DataLoader):
        return loader
    spare: Any = copy.copy(loader)
    spare._iterator = None
    return spare


def end_workers(iterator: Any) -> None:
    """End the worker processes behind a ``DataLoader``'s iterator now; others have none.

    An error that a worker raised holds the iterator, and itself, in a cycle. Left to the garbage collector, that may be found
    in a worker that is forked later, where the iterator's finaliser would wait for processes that are not its own.
    """
    end = getattr(iterator, "_shutdown_workers", None)
    if end is not None:
        if getattr(iterator, "_worker_pids_set", False):
            # A worker that ends may be aborted by its libraries. Torch's error about that would hide the dataset's.
            torch._C._remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
        end()


def wake(iterator: Any) -> None:
    """End a ``DataLoader``'s wait for its workers, on another thread, with an error. It looks for dead ones every five seconds.

    Args:
        iterator: Of any loader. Nothing is done where there is no such wait, or a worker is sending or died while it was.
    """
    results: Any = getattr(iterator, "_data_queue", None)
    if isinstance(results, queue.Queue):  # of the thread that page-locks
        results.put(_SENT_BY_NO_WORKER)
        return
    lock = getattr(results, "_wlock", None)
    writer = getattr(results, "_writer", None)
    if lock is None or writer is None:
        return
    # Not put(): it starts a thread, which an interpreter that is ending cannot.
    with suppress(OSError, ValueError):  # the queue is closed
        try:
            # Where there is no room, there is a batch to be read.
            if lock.acquire(block=False) and select.select([], [writer], [], 0)[1]:
                results._sem.acquire(block=False)  # which get() releases
                writer.send_bytes(pickle.dumps(_SENT_BY_NO_WORKER))
        finally:
            if lock._semlock._is_mine():  # also after an interrupt
                lock.release()


def is_stateful(loader: Any) -> bool:
    """Whether ``loader`` has a state: ``state_dict`` and ``load_state_dict``."""
    # Accelerate's loaders have the methods whether or not the one they prepared has a state.
    inner = getattr(loader, "base_dataloader", loader)
    return has_state(loader) and has_state(inner)


def has_state(value: Any) -> bool:
    """Whether an object has ``state_dict`` and ``load_state_dict``."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def iterated_as(loader: Any, kind: Any) -> bool:
    """Whether ``loader``, of a subclass of ``kind``, is iterated as ``kind`` is."""
    return type(loader).__iter__ is kind.__iter__ and type(loader)._get_iterator is kind._get_iterator


StateReader = Callable[[bool], Any]
"""Returns the loader's state. Argument: whether the iterator has ended. Called on the thread that reads it."""


def state_reader(loader: Any, iterator: Iterator[Any]) -> StateReader:
    """A function that returns the loader's state, or ``None`` if it has none."""
    if not is_stateful(loader):
        return _no_state
    # A loader knows of its newest iterator only.
    holder: Any = iterator if callable(getattr(iterator, "state_dict", None)) else loader

    def read(_ended: bool) -> Any:
        try:
            return copy.deepcopy(holder.state_dict())  # a copy: it may go on changing as more is read
        except Exception as error:
            return error  # raised by state_dict(); batches do not depend on it

    return read


Begun = tuple[Iterator[Any], StateReader]
"""(iterator, state reader) of one iteration over a loader."""

Begin = Callable[[Any], Begun]


def begin_epoch(loader: Any) -> Begun:
    """An iterator of ``loader``, and its state reader."""
    iterator = iter(loader)
    return iterator, state_reader(loader, iterator)


def begin_later(loader: Any, skip: int) -> Begun:
    """As ``begin_epoch``, without the first ``skip`` batches."""
    iterator, state = begin_epoch(loader)
    return drop_first(iterator, skip), state


def drop_first(iterator: Iterator[Any], batches: int) -> Iterator[Any]:
    """``iterator`` without its first ``batches``, which the first ``next`` reads and drops."""
    return _Later(iterator, batches) if batches else iterator


class _Later(Iterator[Any]):
    def __init__(self, iterator: Iterator[Any], batches: int) -> None:
        self._iterator = iterator
        self._rest = islice(iterator, batches, None)
        self._data_queue = getattr(iterator, "_data_queue", None)  # as a DataLoader's iterator has it

    def __next__(self) -> Any:
        return next(self._rest)

    def _shutdown_workers(self) -> None:  # likewise
        end_workers(self._iterator)


def tell_epoch(loader: Any, epoch: int) -> None:
    """Call ``set_epoch`` of the loader, or else of all its parts that have it."""
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)
        return
    for part in parts(loader).values():
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def told_epoch(loader: Any) -> int:
    """The largest epoch that samplers of ``loader`` were set to, or 0. Frameworks set it there, not in a ``StreamedLoader``."""
    epochs = (as_int(getattr(part, "epoch", 0)) for part in parts(loader).values() if hasattr(part, "set_epoch"))
    return max((epoch for epoch in epochs if epoch is not None), default=0)


def as_int(value: Any) -> int | None:
    """A whole number, NumPy's too, as an int; ``None`` for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def parts(loader: Any) -> dict[str, Any]:
    """``loader`` and its samplers and dataset, each once, by the path from the loader."""
    found: dict[str, Any] = {"": loader}
    # Accelerate's batch sampler of one rank holds the batch sampler of all.
    for path in ("sampler", "batch_sampler", "batch_sampler.sampler", "batch_sampler.batch_sampler.sampler", "dataset"):
        with suppress(AttributeError):
            part = operator.attrgetter(path)(loader)
            if not any(part is other for other in found.values()):
                found[path] = part
    return found


def _no_state(_ended: bool) -> None:
    return None
