"""What is read from the user's loader, and done to it: state, epoch, worker processes."""

import copy
import operator
from collections.abc import Callable, Iterator
from contextlib import suppress
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


def state_reader(loader: Any, iterator: Iterator[Any]) -> Callable[[], Any]:
    """A function that says how far ``iterator`` has been read, for the thread that reads it; ``None`` if that is not known."""
    if not is_stateful(loader):
        return _no_state
    # A loader knows of its newest iterator only.
    holder: Any = iterator if callable(getattr(iterator, "state_dict", None)) else loader

    def read() -> Any:
        try:
            return copy.deepcopy(holder.state_dict())  # a copy: it may go on changing as more is read
        except Exception as error:
            return error  # for whoever asks for the state; batches do not depend on it

    return read


def tell_epoch(loader: Any, epoch: int) -> None:
    """Call ``set_epoch`` of the loader, or else of those of its parts that have it."""
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)
        return
    told: list[Any] = []
    for path in ("sampler", "batch_sampler", "batch_sampler.sampler", "dataset"):
        with suppress(AttributeError):
            part = operator.attrgetter(path)(loader)
            if hasattr(part, "set_epoch") and not any(part is other for other in told):
                told.append(part)
    for part in told:
        part.set_epoch(epoch)


def _no_state() -> None:
    return None
