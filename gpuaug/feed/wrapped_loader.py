"""Functions on the wrapped loader, the iterable inside a ``StreamedLoader``: its state, epoch, workers, errors and draws.

Private names of torch's ``DataLoader``, tried with torch 2.8 and 2.14. Only this file uses them, and, for iterators of
persistent workers and the state of a loader, ``feed``, ``prefetch``, ``resumable``, ``stateful`` and ``prepared_loader``:

- ``_iterator``: running iterator of persistent workers. The feed stores the iterator of workers that write into slots.
- ``_get_iterator``: to start workers with other attributes.
- ``_index_sampler``: to read and to replace the sampler that draws the indices.
- ``_workers``: processes of an iterator.
- ``_shutdown_workers``, ``_worker_pids_set``, ``torch._C._remove_worker_pids``: to end workers.
- ``_task_info``, ``_rcvd_idx``: to find the worker whose batch is awaited.
- ``_data_queue``, and ``_wlock``, ``_writer``, ``_sem`` of its queue: to wake a thread that waits in ``next``.
- ``torch._utils.ExceptionWrapper``: its frame keeps the error of a worker alive.
"""

import copy
import multiprocessing
import operator
import pickle
import queue
import select
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice, product
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from typing import Any, NamedTuple

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset

from gpuaug.core.errors import ArgumentTypeError, add_note, without_addresses

_WAKE_ITEM = (None, None)
"""(index, data) in the form of a worker's result. A ``DataLoader`` that receives it raises, because no task has this index."""

_ENCODED_ADVICE = "For encoded files, pass collate_fn=gpuaug.collate_encoded"
_ADVICE = {
    "found <class 'PIL.": "For PIL images, use v2.PILToTensor() in the dataset, or pass collate_fn=gpuaug.collate_ragged",
    "found <class 'gpuaug.core.": "For a dataset of batches, pass batch_size=None",
    "found <class 'gpuaug.": _ENCODED_ADVICE,
    "found <class 'pathlib": _ENCODED_ADVICE,
    "stack expects each tensor to be equal size": "For images of several sizes, or target dicts, pass "
    "collate_fn=gpuaug.collate_ragged",
}
"""Part of an error message of ``default_collate`` → advice."""

_MEMBER_NOTE = "gpuaug: raised by default_collate for"
"""Beginning of the note that ``collate_ragged`` and ``collate_encoded`` add to an error about one member of the samples."""


def checked_iterable(loader: Any) -> Any:
    """Return ``loader`` after checking that it is an iterable of batches.

    Raises:
        ArgumentTypeError: If ``loader`` is not iterable, is text, bytes, a mapping or a scalar tensor, or is a map-style
            dataset, whose items are samples.
    """
    has_iter = callable(getattr(type(loader), "__iter__", None))
    is_text_mapping_or_scalar = isinstance(loader, str | bytes | Mapping) or getattr(loader, "ndim", 1) == 0
    if is_text_mapping_or_scalar or not (has_iter or hasattr(type(loader), "__getitem__")):
        raise ArgumentTypeError(
            f"loader must be an iterable of batches, got {type(loader).__name__}. Pass a DataLoader, a list or a generator."
        )
    if isinstance(loader, Dataset) and not has_iter:
        raise ArgumentTypeError(
            f"loader must be an iterable of batches, got the dataset {type(loader).__name__}. Pass DataLoader(dataset, "
            "batch_size=…), with batch_size=None if the items of the dataset are batches."
        )
    return loader


def add_collate_advice(error: BaseException) -> None:
    """Add advice to an error of ``default_collate`` about images, as a note.

    Without effect if ``collate_ragged`` or ``collate_encoded`` called ``default_collate`` for one member: the error then has a
    note about this member, and the advice to pass these functions would not help.
    """
    if type(error) not in (TypeError, RuntimeError):
        return
    # An error of a worker has no notes. Its text is the traceback in the worker, with the notes.
    if any(_MEMBER_NOTE in text for text in (str(error), *getattr(error, "__notes__", ()))):
        return
    for part, advice in _ADVICE.items():
        if part in str(error):
            add_note(error, f"gpuaug: the DataLoader could not stack these samples. {advice}.")
            return


def release_error(error: BaseException) -> None:
    """Break the reference cycle of an error of a ``DataLoader``'s worker: torch raises the error from a variable of a frame.

    The traceback also holds the loader's iterator. If the garbage collector frees the iterator of persistent workers, it may
    free the queues to the workers first. The iterator's finaliser then waits for five seconds per worker.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is ExceptionWrapper.reraise.__code__:
            frame.clear()


def is_of_worker(error: BaseException) -> bool:
    """Return whether a ``DataLoader`` raised an error that it received from a worker."""
    return any(frame.f_code is ExceptionWrapper.reraise.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


def awaited_worker(iterator: Any) -> int | None:
    """Return the number of the worker whose batch an iterator of a ``DataLoader`` awaits; ``None`` if that is not known."""
    inner = inner_iterator(iterator)
    # ``_task_info``: index of a batch → (worker, …). ``_rcvd_idx``: index of the batch that is awaited.
    worker: int | None = getattr(inner, "_task_info", {}).get(getattr(inner, "_rcvd_idx", None), (None,))[0]
    return worker


def dataset_of(loader: Any) -> Any:
    """Return the user's dataset in a ``DataLoader``, also if ``FeatureCache.wrap`` has wrapped the dataset."""
    return getattr(loader.dataset, "gpuaug_unwrapped", loader.dataset)


def has_persistent_workers(loader: Any) -> bool:
    """Return whether ``loader`` is a ``DataLoader`` with persistent workers, which has one iterator for all epochs."""
    return bool(getattr(loader, "persistent_workers", False)) and hasattr(loader, "_iterator")


def has_running_workers(loader: Any) -> bool:
    """Return whether persistent workers of ``loader`` are running."""
    return getattr(loader, "_iterator", None) is not None


def runs_workers(loader: Any) -> bool:
    """Return whether an attribute of ``loader`` is an iterator with running workers, for example to use them in every epoch."""
    iterators = [value for value in vars(loader).values() if hasattr(value, "_shutdown_workers")]
    return any(worker.exitcode is None for iterator in iterators for worker in iterator._workers)


def without_iterator(loader: Any) -> Any:
    """Return ``loader``; for a ``DataLoader`` with running persistent workers, a copy without its iterator.

    The copy can be pickled.
    """
    if not (has_running_workers(loader) and isinstance(loader, DataLoader)):
        return loader
    loader_copy: Any = copy.copy(loader)
    loader_copy._iterator = None
    return loader_copy


class _EndEvent(Event):
    """Event that ends the workers of an iterator, read and set without a lock.

    A worker that is killed while it reads torch's event may hold the lock of the event forever. The iterator's finaliser, which
    sets the event, and the other workers would then wait forever, too.
    """

    def is_set(self) -> bool:
        """Return whether the workers must end."""
        return not self._flag._semlock._is_zero()  # type: ignore[attr-defined]

    def set(self) -> None:
        """Let the workers end."""
        self._flag.release()  # type: ignore[attr-defined]


@contextmanager
def replaced(loader: Any, **attributes: Any) -> Iterator[None]:
    """Context manager in which a ``DataLoader`` has other attributes, for the iterator and the workers that it creates."""
    user_attributes = {name: getattr(loader, name) for name in attributes}
    try:
        for name, value in attributes.items():
            object.__setattr__(loader, name, value)  # DataLoader.__setattr__ would raise for samplers
        yield
    finally:
        for name, value in user_attributes.items():
            object.__setattr__(loader, name, value)


def proxy_of(loader: Any, **attributes: Any) -> Any:
    """Return a second object for a ``DataLoader``, with other values of some attributes. All other attributes are shared.

    The user's loader is not changed: other threads may be iterating it, and its ``__iter__`` may start workers at any time, for
    example at the first ``next`` of a generator.
    """
    cls = type(loader)
    # Members of ``__slots__`` precede those of the shared ``__dict__``. Finalisers belong to the user's loader.
    members = {"__slots__": tuple(attributes), "__module__": cls.__module__, "__del__": lambda _: None}
    proxy: Any = object.__new__(type(cls.__name__, (cls,), members))
    object.__setattr__(proxy, "__dict__", vars(loader))
    for name, value in attributes.items():
        object.__setattr__(proxy, name, value)
    return proxy


def worker_context(loader: Any, processes: list[weakref.ref[BaseProcess]]) -> Any:
    """Return a copy of a ``DataLoader``'s multiprocessing context, for new workers.

    The workers end by an ``_EndEvent``, and are added to ``processes``.
    """
    context: Any = copy.copy(loader.multiprocessing_context or multiprocessing.get_context())
    process_class = context.Process

    def process(*args: Any, **kwargs: Any) -> BaseProcess:
        worker: BaseProcess = process_class(*args, **kwargs)
        processes.append(weakref.ref(worker))
        return worker

    context.Event = partial(_EndEvent, ctx=context)
    context.Process = process
    return context


def end_workers(iterator: Any) -> None:
    """End the worker processes of an iterator of a ``DataLoader``. Do nothing for other iterators.

    Without this call, the iterator may live on in a reference cycle with an error of a worker. If the garbage collector then
    freed the iterator in a worker that was forked later, the iterator's finaliser would wait for processes that are not
    children of this worker.
    """
    iterator = inner_iterator(iterator)
    shut_down = getattr(iterator, "_shutdown_workers", None)
    if shut_down is not None:
        if getattr(iterator, "_worker_pids_set", False):
            # A native library may abort a worker while the worker exits. Without this call, torch would raise its error about
            # a killed worker, in place of the dataset's error.
            torch._C._remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
        shut_down()


def wake(iterator: Any) -> None:
    """Make the ``next`` of a ``DataLoader``'s iterator raise an error, if another thread is waiting in it.

    Otherwise the thread could wait for five seconds, the interval at which ``DataLoader`` checks for dead workers. Call this
    function only to end the iterator: if no thread is waiting, a later ``next`` raises the error. Nothing is sent if a worker
    holds the lock of the queue, because it is sending a batch or died while sending, or if the pipe is full.

    Args:
        iterator: Iterator of any loader.
    """
    results: Any = getattr(inner_iterator(iterator), "_data_queue", None)
    if isinstance(results, queue.Queue):  # queue of the pin-memory thread
        results.put(_WAKE_ITEM)
        return
    lock = getattr(results, "_wlock", None)
    writer = getattr(results, "_writer", None)
    if lock is None or writer is None:
        return
    # Not put(): it starts a thread, which is impossible while the interpreter ends.
    with suppress(OSError, ValueError):  # the queue is closed
        try:
            # If the pipe is full, it holds a batch, and next() does not wait.
            if lock.acquire(block=False) and select.select([], [writer], [], 0)[1]:
                results._sem.acquire(block=False)  # get() releases it
                writer.send_bytes(pickle.dumps(_WAKE_ITEM))
        finally:
            if lock._semlock._is_mine():  # also if a KeyboardInterrupt was raised right after acquire()
                lock.release()


def is_stateful(loader: Any) -> bool:
    """Return whether ``loader``, and the loader that it wraps, if any, have ``state_dict`` and ``load_state_dict``."""
    # Accelerate's loaders have the methods even if the loaders that they wrap have not. The methods then do not work.
    inner = getattr(loader, "base_dataloader", loader)
    return has_state_methods(loader) and has_state_methods(inner)


def has_state_methods(value: Any) -> bool:
    """Return whether ``value`` has the methods ``state_dict`` and ``load_state_dict``."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def uses_iteration_of(loader: Any, base: Any) -> bool:
    """Return whether the class of ``loader``, ``base`` or a subclass, overrides neither ``__iter__`` nor ``_get_iterator``."""
    return type(loader).__iter__ is base.__iter__ and type(loader)._get_iterator is base._get_iterator


StateReader = Callable[[bool | None], Any]
"""Function that returns the loader's state, called on the thread that iterates.

The argument is ``None`` before the first batch, then whether the iterator has ended. The result is ``None`` for a loader
without a state. If reading the state raised an exception, the result is the exception, for ``StreamedLoader.state_dict`` to
raise.
"""


def state_reader(loader: Any, iterator: Iterator[Any]) -> StateReader:
    """Return the ``StateReader`` of ``loader``, whose current iterator is ``iterator``.

    Before the first batch, the function returns ``None`` without asking: ``state_dict`` of a loader may change its position,
    as LitData's does between the loading of a state and the first batch.
    """
    if not is_stateful(loader):
        return lambda _ended: None
    # From the iterator if possible, because a loader returns the state of its newest iterator.
    source: Any = iterator if callable(getattr(iterator, "state_dict", None)) else loader

    def read(ended: bool | None) -> Any:
        if ended is None:
            return None
        try:
            return copy.deepcopy(source.state_dict())  # a copy: later batches may change the returned object
        except Exception as error:
            return error  # to be raised by StreamedLoader.state_dict(), not by next()

    return read


IteratorAndReader = tuple[Iterator[Any], StateReader]
"""(iterator, state reader) of one iteration over a loader."""

BeginFunction = Callable[[Any], IteratorAndReader]
"""Function that begins an iteration over a loader."""


def begin_after(loader: Any, skip: int = 0) -> IteratorAndReader:
    """Begin an iteration over ``loader`` after its first ``skip`` batches."""
    iterator = iter(loader)
    return drop_first(iterator, skip), state_reader(loader, iterator)


def drop_first(iterator: Iterator[Any], count: int) -> Iterator[Any]:
    """Return an iterator that omits the first ``count`` batches of ``iterator``. Its first ``next`` reads and drops them."""
    return OuterIterator(iterator, islice(iterator, count, None)) if count else iterator


class OuterIterator(Iterator[Any]):
    """Iterator that reads another iterator.

    Args:
        inner: The other iterator.
        batches: Iterator over the batches to return, which reads ``inner``.
    """

    def __init__(self, inner: Iterator[Any], batches: Iterator[Any]) -> None:
        self.inner = inner
        self._batches = batches

    def __next__(self) -> Any:
        return next(self._batches)


def inner_iterator(iterator: Any) -> Any:
    """Return the iterator of the loader that an ``OuterIterator`` reads; any other iterator unchanged."""
    while isinstance(iterator, OuterIterator):
        iterator = iterator.inner
    return iterator


def set_epoch_of(loader: Any, epoch: int) -> None:
    """Call ``set_epoch`` of the loader; if the loader has no such method, call it for its samplers and its dataset."""
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)
        return
    for part in parts(loader).values():
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def epoch_of(loader: Any) -> int:
    """Return the largest ``epoch`` among the loader, its samplers and its dataset; 0 if none of them has ``set_epoch``."""
    epochs = (as_int(getattr(part, "epoch", 0)) for part in parts(loader).values() if hasattr(part, "set_epoch"))
    return max((epoch for epoch in epochs if epoch is not None), default=0)


def as_int(value: Any) -> int | None:
    """Convert a whole number, including NumPy's, to an int; return ``None`` for any other value."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def parts(loader: Any) -> dict[str, Any]:
    """Return attribute path → object, for the loader (path ``""``), its samplers and its dataset. Each object occurs once.

    A sampler may wrap another one as its attribute ``sampler`` or ``batch_sampler``: torch's ``BatchSampler`` wraps the sampler
    of samples, Accelerate's batch sampler of one rank wraps the batch sampler of all ranks.
    """
    result: dict[str, Any] = {"": loader}
    for path in _PATHS:
        part = None
        with suppress(AttributeError):
            part = operator.attrgetter(path)(loader)
        if part is not None and not any(part is other for other in result.values()):
            result[path] = part
    return result


_MAX_DEPTH = 5
"""Maximum number of names in a path of a sampler: ``__getattr__`` of an object may return a new object for every name."""

_PATHS = [
    *(".".join(names) for depth in range(_MAX_DEPTH) for names in product(("sampler", "batch_sampler"), repeat=depth + 1)),
    "dataset",
]
"""Attribute paths of ``parts``."""


def attribute_of(name: str, objects: Iterable[Any]) -> int | None:
    """Return the first attribute ``name`` of ``objects`` that is a whole number; ``None`` without one."""
    values = (as_int(getattr(value, name, None)) for value in objects)
    return next((value for value in values if value is not None), None)


_MAX_TEXT = 200
"""Maximum number of characters of a setting in a state."""


def plain_value(value: Any) -> bool | int | str | None:
    """Return a setting of a sampler as a value of a state: ``None``, a bool or an int unchanged, any other value as text."""
    if value is None or isinstance(value, bool):
        return value
    number = as_int(value)
    return without_addresses(repr(value))[:_MAX_TEXT] if number is None else number


def index_sampler(loader: Any) -> Any:
    """Return the batch sampler of a ``DataLoader``, or its sampler if it has no batch sampler."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


class Start(NamedTuple):
    """Start of the next epoch of a wrapped loader. By default the epoch begins at its first batch."""

    batches: int = 0
    """Number of batches to skip."""
    worker_seed: int | None = None
    """Seed from which the ``DataLoader`` draws the seeds of workers. ``None``: it draws them from its own generator."""
    state: Any = None
    """Loaded state of the wrapped loader; ``None``: the current state."""
    same_order: bool = True
    """Whether to raise an error if the order of the samples differs from the order in ``state``."""


FIRST_BATCH = Start()
"""Start of an epoch at its first batch."""

START_WITH_NEW_WORKERS = Start(worker_seed=0)
"""Start of an epoch whose workers get a keyed seed, because the seeds of the old workers were drawn in an earlier epoch."""
