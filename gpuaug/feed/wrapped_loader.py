"""What is read from the user's loader, and done to it: state, epoch, worker processes."""

import copy
import operator
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any


def has_persistent_workers(loader: Any) -> bool:
    """Whether ``loader`` is a ``DataLoader`` that keeps its workers, and its one iterator, from epoch to epoch."""
    return bool(getattr(loader, "persistent_workers", False)) and hasattr(loader, "_iterator")


def end_workers(iterator: Any) -> None:
    """End the worker processes behind a ``DataLoader``'s iterator now; others have none.

    An error that a worker raised holds the iterator, and itself, in a cycle. Left to the garbage collector, that may be found
    in a worker that is forked later, where the iterator's finaliser would wait for processes that are not its own.
    """
    end = getattr(iterator, "_shutdown_workers", None)
    if end is not None:
        end()


def is_stateful(loader: Any) -> bool:
    """Whether ``loader`` can say how far it has been read, and go on from there."""
    # Accelerate's loaders have the methods whether or not the one they prepared has a state.
    inner = getattr(loader, "base_dataloader", loader)
    return all(callable(getattr(each, name, None)) for each in (loader, inner) for name in ("state_dict", "load_state_dict"))


def iterated_as(loader: Any, kind: Any) -> bool:
    """Whether ``loader``, of a subclass of ``kind``, is iterated as ``kind`` is."""
    return type(loader).__iter__ is kind.__iter__ and type(loader)._get_iterator is kind._get_iterator


StateReader = Callable[[bool], Any]
"""Says how far an iterator has been read, given whether its end was reached, for the thread that reads it."""


def state_reader(loader: Any, iterator: Iterator[Any]) -> StateReader:
    """What reads the state of a loader that has one. It gives ``None`` for others."""
    if not is_stateful(loader):
        return _no_state
    # A loader knows of its newest iterator only.
    holder: Any = iterator if callable(getattr(iterator, "state_dict", None)) else loader

    def read(_ended: bool) -> Any:
        try:
            return copy.deepcopy(holder.state_dict())  # a copy: it may go on changing as more is read
        except Exception as error:
            return error  # for whoever asks for the state; batches do not depend on it

    return read


Begun = tuple[Iterator[Any], StateReader]
"""A pass over a loader: its iterator, and what reads its state."""

Begin = Callable[[Any], Begun]


def begin_epoch(loader: Any) -> Begun:
    """An iterator of ``loader``, and what reads its state."""
    iterator = iter(loader)
    return iterator, state_reader(loader, iterator)


def begin_later(loader: Any, batches: int) -> Begun:
    """The same without the first ``batches``, which are read where the first one is asked for, and dropped."""
    iterator, state = begin_epoch(loader)
    return _Later(iterator, batches), state


class _Later(Iterator[Any]):
    def __init__(self, iterator: Iterator[Any], batches: int) -> None:
        self._iterator, self._rest = iterator, islice(iterator, batches, None)

    def __next__(self) -> Any:
        return next(self._rest)

    def _shutdown_workers(self) -> None:  # as a DataLoader's iterator has it
        end_workers(self._iterator)


def tell_epoch(loader: Any, epoch: int) -> None:
    """Call ``set_epoch`` of the loader, or else of those of its parts that have it."""
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)
        return
    for part in parts(loader).values():
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def told_epoch(loader: Any) -> int:
    """The epoch that the samplers of ``loader`` were told, or 0. Frameworks tell them, and not what wraps the loader."""
    epochs = (getattr(part, "epoch", 0) for part in parts(loader).values() if hasattr(part, "set_epoch"))
    return max((epoch for epoch in epochs if isinstance(epoch, int)), default=0)


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
