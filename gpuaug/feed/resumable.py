"""Resumption of an epoch at a later batch without loading earlier batches, for lists and for a ``DataLoader`` *by index*.

A ``DataLoader`` is by index if its dataset is map-style. The order of its epoch depends on the sampler and on the generators
from which the sampler draws, so the states of these generators at the beginning of the epoch describe the epoch. To resume the
epoch, the sampler is iterated again from these states, and the indices of the batches that were processed are dropped. No
sample is loaded for dropped indices. Their checksum is compared with the saved state.
"""

import threading
import weakref
import zlib
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from gpuaug.core.errors import GpuAugError, without_addresses
from gpuaug.core.rng import default_rank
from gpuaug.feed.draws_ahead import DrawsAhead, Variable, differ, generator_variables, set_states, states_of
from gpuaug.feed.wrapped_loader import (
    StateReader,
    as_int,
    attribute_of,
    begin_iterator,
    end_workers,
    has_state_methods,
    index_sampler,
    is_stateful,
    parts,
    plain_value,
    sampler_replaced,
    uses_iteration_of,
)

_GLOBAL = "torch"
"""Key of torch's global generator among the generators from which a sampler may draw."""


class Resume(NamedTuple):
    """Position at which the next iteration begins."""

    batches: int
    """Number of batches to skip."""
    seed: int | None
    """Seed for the generator from which the ``DataLoader`` draws the seeds of workers. ``None``: it is not seeded."""
    start: Mapping[str, Any] | None
    """State of the ``ResumableLoader`` at the beginning of the epoch. ``None``: the current state."""
    same_order: bool
    """Whether to raise an error if the order of the samples differs from the order in ``start``."""


def is_resumable(loader: Any) -> bool:
    """Return whether an epoch of ``loader`` can begin at any batch without loading earlier batches."""
    if type(loader) in {list, tuple}:
        return True
    # Not with in_order=False: the batches that were processed may not be the first of the epoch. Not if the sampler is an
    # iterator, which can be iterated only once.
    return is_by_index(loader) and getattr(loader, "in_order", True) and not isinstance(index_sampler(loader), Iterator)


def is_by_index(loader: Any) -> bool:
    """Return whether ``loader`` is a ``DataLoader`` of a map-style dataset, without a state, whose sampler can be replaced."""
    if not isinstance(loader, DataLoader) or is_stateful(loader) or not uses_iteration_of(loader, DataLoader):
        return False
    return not isinstance(loader.dataset, IterableDataset)


_ENTRIES: dict[str, Any] = {"settings": int | str | None, "epochs": int, "generators": torch.Tensor}
"""Key of a mapping in a state → type of the mapping's values."""
_OPTIONAL_ENTRIES: dict[str, Any] = {"begun": torch.Tensor, "order": int}
"""Key of an optional mapping in a state → type of the mapping's values."""


def is_state(state: Any) -> bool:
    """Return whether ``state`` has the structure of a state of ``ResumableLoader``."""
    return (
        isinstance(state, Mapping)
        and isinstance(state.get("rank"), int)
        and all(_maps_names(state.get(name), cls) for name, cls in _ENTRIES.items())
        and all(_maps_names(state.get(name, {}), cls) for name, cls in _OPTIONAL_ENTRIES.items())
        and ("last" not in state or is_state(state["last"]))
    )


def _maps_names(entries: Any, value_type: Any) -> bool:
    """Return whether ``entries`` maps strings to values of ``value_type``. Whole numbers must have at most 64 bits."""
    return isinstance(entries, Mapping) and all(
        isinstance(name, str) and isinstance(value, value_type) and not (isinstance(value, int) and value.bit_length() > 63)
        for name, value in entries.items()
    )


class ResumableLoader:
    """Reader of a loader's state, which can begin the loader's epochs at any batch.

    Args:
        loader: The user's loader, for which ``is_resumable`` or ``is_by_index`` is true.
    """

    def __init__(self, loader: Any) -> None:
        self._by_index = isinstance(loader, DataLoader)
        # The loader itself is not stored: it may refer to an iterator that refers to this object, a reference cycle.
        self._dataset: Any = loader.dataset if self._by_index else loader
        self.sampler: Any = index_sampler(loader) if self._by_index else None
        """Batch sampler of the loader, or its sampler if it has no batch sampler."""
        names = [type(sampler).__name__ for sampler in (self.sampler, getattr(loader, "sampler", None))]
        self._sampler_names = " of ".join(dict.fromkeys(names))
        paths = parts(loader) if self._by_index else {}
        self._parts_with_epoch = {
            path: part
            for path, part in paths.items()
            if callable(getattr(part, "set_epoch", None)) and as_int(getattr(part, "epoch", None)) is not None
        }
        self.generators: dict[str, torch.Generator] = {}
        """Attribute path → generator of a sampler, or from which seeds of workers are drawn; without torch's global one."""
        for path, part in paths.items():
            generator: Any = getattr(part, "generator", None)
            others = (torch.default_generator, *self.generators.values())
            is_new = isinstance(generator, torch.Generator) and not any(generator is other for other in others)
            if path != "dataset" and is_new:
                self.generators[path or "loader"] = generator
        samplers = [part for path, part in paths.items() if path not in ("", "dataset")]
        custom_samplers = [part for part in samplers if type(part).__module__.partition(".")[0] not in _LIBRARIES]
        self._has_custom_sampler = bool(custom_samplers)
        # torch draws the seeds of workers from the loader's generator: once for persistent workers, else once per epoch.
        # For persistent workers, torchdata also creates one more iterator of the sampler.
        depends = any(getattr(part, "generator", self) is loader.generator for part in samplers) or (
            is_stateful(loader) and not isinstance(self._dataset, IterableDataset)
        )
        self._worker_settings = {"persistent_workers": loader.persistent_workers} if depends else {}
        self._generator_variables = generator_variables([loader, *samplers] if self._by_index else [])
        self.has_custom_sampler_with_state = any(has_state_methods(part) for part in custom_samplers)
        """Whether a sampler that is not of ``_LIBRARIES`` has ``state_dict`` and ``load_state_dict``."""
        self._rank = attribute_of("rank", paths.values())
        self.ranks = attribute_of("num_replicas", paths.values())
        """Number of ranks among which a sampler divides the dataset; ``None`` without such a sampler."""
        self.draws_ahead: DrawsAhead | None = None
        """Draws of the sampler in the epoch that was begun last; ``None`` if they are not known."""

    def settings(self) -> dict[str, Any]:
        """Return name → value of the settings, other than the order, on which the batches of an epoch depend."""
        length = None
        with suppress(Exception):  # a dataset need not have a length
            length = len(self._dataset)
        if not self._by_index:
            return {"batches": length}
        return {
            "samples": length,
            "batch_size": plain_value(getattr(self.sampler, "batch_size", None)),
            "drop_last": plain_value(getattr(self.sampler, "drop_last", None)),
            "sampler": self._sampler_names,
            "generators": ", ".join(self.generators) or "none",
            **self._worker_settings,
        }

    @property
    def epochs(self) -> dict[str, int | None]:
        """Attribute path → epoch, for each sampler with an epoch.

        Assign a mapping to set epochs. Samplers that are not in the mapping keep their epochs.
        """
        return {path: as_int(part.epoch) for path, part in self._parts_with_epoch.items()}

    @epochs.setter
    def epochs(self, value: Mapping[str, int | None]) -> None:
        for path, part in self._parts_with_epoch.items():
            if path in value:
                part.set_epoch(value[path])

    def new_draws_ahead(self) -> DrawsAhead:
        """Return a record of the draws of an epoch, and set ``draws_ahead``."""
        epochs = [(partial(getattr, part, "epoch"), part.set_epoch) for part in self._parts_with_epoch.values()]
        self.draws_ahead = DrawsAhead([*self._generator_variables, *epochs], is_custom=self._has_custom_sampler)
        return self.draws_ahead

    def state(self, generators: Mapping[str, torch.Tensor], epochs: Mapping[str, int | None] | None = None) -> dict[str, Any]:
        """Return the state of the loader.

        Args:
            generators: Attribute path → state of each generator.
            epochs: Attribute path → epoch of each sampler. Default: the current epochs.
        """
        rank = default_rank() if self._rank is None else self._rank
        epochs = dict(self.epochs if epochs is None else epochs)
        return {"settings": self.settings(), "rank": rank, "epochs": epochs, "generators": dict(generators)}

    def restart(self, state: Mapping[str, Any]) -> None:
        """Set generators and the epochs of samplers to ``state``, which was saved before the first batch of the first epoch."""
        self.epochs = state["epochs"]
        set_states(self.generators, state["generators"])

    def accepts(self, state: Any) -> bool:
        """Return whether ``state`` is a state that ``restart``, ``restore_end`` and ``begin`` can use."""
        if not is_state(state):
            return False
        with suppress(TypeError, RuntimeError):
            for part in (state, state.get("last", state)):
                for name, value in (*part["generators"].items(), *part.get("begun", {}).items()):
                    torch.Generator(self.generators.get(name, torch.default_generator).device).set_state(value)
            return True
        return False

    def restore_end(self, state: Mapping[str, Any], *, same_order: bool) -> None:
        """Set generators, and what a custom sampler counts or draws from, to the end of the epoch of ``state``.

        Call on the thread that may draw from torch's global generator. The epochs of samplers are not changed.

        Args:
            state: State at the end of an epoch, or after its last batch, as Accelerate saves it.
            same_order: Whether to raise an error if the order of the samples differs from the saved epoch.

        Raises:
            GpuAugError: If the order differs.
        """
        ended = "last" in state
        last = state["last"] if ended else state
        states_at_end = state["generators"]
        if "order" in last and (self._has_custom_sampler or not ended):
            states_after_replay = self._replay(last, same_order=same_order)
            states_at_end = states_at_end if ended else {**states_after_replay, **state.get("begun", {})}
        set_states(self.generators, states_at_end)

    def _replay(self, last: Mapping[str, Any], *, same_order: bool) -> dict[str, torch.Tensor]:
        """Iterate the sampler through a whole epoch, and return the states of the sampler's generators after it.

        The generators, torch's global generator and the epochs of samplers are restored.

        Args:
            last: State after the last batch of the epoch.
            same_order: Whether to raise an error if the order of the samples differs from the epoch of ``last``.
        """
        recording = _RecordingSampler(self, self.sampler, Resume(0, None, last, same_order))
        recording.states = last["generators"]
        recording.epochs = last["epochs"]
        epochs = self.epochs
        states_before = states_of(recording.generators)
        try:
            deque(iter(recording), maxlen=0)
            states_after = states_of(self.generators)
        finally:
            self.epochs = epochs
            set_states(recording.generators, states_before)
        if recording.order_error is not None:
            raise recording.order_error
        return states_after

    def begin(self, loader: Any, resume: Resume | None) -> tuple[Iterator[Any], StateReader]:
        """Begin an epoch. Call on the thread that may draw from torch's global generator.

        Args:
            loader: The user's loader, or a copy of it.
            resume: Position at which the epoch begins; ``None``: its first batch.

        Returns:
            The iterator, and a function that reads the state.

        Raises:
            GpuAugError: If the order of the sampler differs from the order of the resumed epoch.
        """
        if not self._by_index:
            state = self.state({})
            return islice(begin_iterator(loader), resume.batches if resume is not None else 0, None), lambda _ended: state
        return self.begin_recorded(loader, resume)

    def begin_recorded(self, loader: Any, resume: Resume | None) -> tuple[Any, StateReader]:
        """Begin an epoch of a ``DataLoader`` by index.

        Args:
            loader: The user's loader, or a copy of it.
            resume: Position at which the epoch begins; ``None``: its first batch.

        Returns:
            The iterator of the loader, and a function that reads the state.

        Raises:
            GpuAugError: If the order of the sampler differs from the order of the resumed epoch.
        """
        recording = _RecordingSampler(self, self.sampler, resume)
        read_open_to_end(recording.draws_ahead.variables)
        states_before = states_of(recording.generators)
        try:
            if resume is not None and resume.seed is not None:  # workers must not draw the numbers of an earlier epoch
                (loader.generator or torch.default_generator).manual_seed(resume.seed)
            if resume is not None and resume.start is not None:
                recording.states = resume.start["generators"]
                recording.epochs = resume.start["epochs"]
            else:
                recording.states = states_before
            with sampler_replaced(loader, recording):
                iterator = begin_iterator(loader)
                recording.newest.begin()
            if recording.order_error is not None:
                end_workers(iterator)
                loader._iterator = None
                raise recording.order_error
        except BaseException:
            if resume is not None:
                set_states(recording.generators, states_before)
            raise
        if resume is not None and resume.start is not None:
            # A generator in the saved state keeps the state after the draw of the order, as in the interrupted run. Other
            # generators are restored.
            saved_names = self.generators.keys() & resume.start["generators"].keys()
            set_states(recording.generators, {name: state for name, state in states_before.items() if name not in saved_names})
            set_states(self.generators, resume.start.get("begun", {}))
        indices = recording.newest
        if not loader.num_workers:
            indices.store_states_after_order()
        skipped = resume.batches if resume is not None else 0
        prefetched = loader.num_workers * (loader.prefetch_factor or 0)
        recording.draws_ahead.items_before_first = skipped + iterator._num_yielded + prefetched
        return iterator, lambda ended: indices.state(None if ended else skipped + iterator._num_yielded)


class _RecordingSampler:
    """Replacement for the sampler of a ``DataLoader``. Its iterators record the states of generators."""

    def __init__(self, resumable: ResumableLoader, sampler: Any, resume: Resume | None) -> None:
        self.resumable = resumable
        self.resume = resume
        self.generators = {**resumable.generators, _GLOBAL: torch.default_generator}
        self.states: Mapping[str, torch.Tensor] = {}
        """States to set before the user's sampler is iterated, if an epoch is resumed."""
        self.epochs: Mapping[str, int | None] = resumable.epochs
        """Epochs to set before the user's sampler is iterated, if an epoch is resumed."""
        self.order_error: GpuAugError | None = None
        """Error to raise after the ``DataLoader`` has created its iterator, whose workers can then be ended."""
        self._sampler = sampler
        self.draws_ahead = resumable.new_draws_ahead()

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> "EpochIndices":
        # A DataLoader with workers calls this method twice, and reads only the second iterator.
        self.newest = EpochIndices(self)
        return self.newest

    def iterate(self) -> Iterator[Any]:
        """Return an iterator of the user's sampler. The sampler may draw now, or when the iterator is read."""
        return iter(self._sampler)


class EpochIndices(Iterator[Any]):
    """Iterator over the indices of one epoch, with the state at the beginning of the epoch."""

    def __init__(self, recording: _RecordingSampler) -> None:
        self._recording = recording
        self.draws_ahead = recording.draws_ahead
        self._states_before = states_of(recording.generators)
        """States of the generators before the user's sampler is iterated."""
        self._epochs = recording.resumable.epochs
        self._indices = recording.iterate()  # a sampler that counts epochs may increase its epoch in this call
        self._order_is_drawn = differ(self._states_before, states_of(recording.generators))
        """Whether ``iter(sampler)`` has drawn the order. Other samplers draw when their iterator is read."""
        self._read_ahead: deque[Any] = deque()
        """Items of the sampler that ``begin`` has read and that were not returned yet."""
        self._checksums = array("I", [0])
        """Checksum of the first n items of the sampler, at index n."""
        self._error: Exception | None = None
        """Error of the sampler when it was read ahead, raised after the items before it."""
        self._lock = threading.Lock()
        """Lock of the sampler's iterator: the pulling thread and ``read_to_end`` read it."""
        self._start: Mapping[str, Any] | None = None
        """State at the beginning of the epoch; ``None`` before ``begin``."""

    def begin(self) -> None:
        """Make the sampler draw the order, and store the state at the beginning of the epoch. A second call does nothing."""
        if self._start is not None:
            return
        recording = self._recording
        resume = recording.resume
        recording.resume = None  # because with persistent workers, later epochs iterate this sampler, too
        states = self._states_before if self._order_is_drawn else states_of(recording.generators)
        try:
            if resume is not None and (resume.seed is not None or resume.start is not None):
                set_states(recording.generators, recording.states)
                recording.resumable.epochs = recording.epochs
                self._epochs = recording.resumable.epochs
                states = states_of(recording.generators)
                self._indices = recording.iterate()
            saved = resume.start if resume is not None and resume.start is not None else {}
            skipped = resume.batches if resume is not None else 0
            order = saved.get("order", {})
            num_compared = order.get("batches", 0)
            read = partial(self._read, max(1, skipped, num_compared))
            self._read_ahead.extend(recording.draws_ahead.read_first(read))
        except Exception as error:
            self._error = error
        if torch.equal(states[_GLOBAL], torch.default_generator.get_state()):
            del states[_GLOBAL]  # the sampler does not draw from torch's global generator
        start = self._start = recording.resumable.state(states, self._epochs)
        _open.add(self)
        if resume is None or self._error is not None:
            return
        if resume.same_order and order and saved["rank"] == start["rank"] and order != self._order(num_compared):
            recording.order_error = GpuAugError(
                "The run cannot be resumed, because the sampler returns other batches than in the saved epoch. Use a "
                "DataLoader with the same dataset, sampler and seed. A custom sampler may depend only on its epoch and its "
                "attribute generator. To continue with another order, pass strict=False to load_state_dict."
            )
        for _ in range(min(skipped, len(self._read_ahead))):
            self._read_ahead.popleft()

    def read_to_end(self) -> None:
        """Read the remaining items, if their number is known, and postpone draws that are not due in a plain ``DataLoader``."""
        length = 0
        with suppress(Exception):  # a sampler need not have a length
            length = len(self._recording)
        with self._lock:
            try:
                for index in range(len(self._checksums) - 1, length + 1):  # the last reads the end
                    items = self.draws_ahead.read(index, partial(self._read, 1))
                    self._read_ahead.extend(items)
                    if not items:
                        self.draws_ahead.postpone()
                        return
            except Exception as error:
                self._error = error

    def _read(self, count: int) -> list[Any]:
        """Read at most ``count`` items of the user's sampler, and extend the checksums."""
        items = list(islice(self._indices, count))
        for item in items:
            self._checksums.append(zlib.crc32(_bytes_of(item), self._checksums[-1]))
        return items

    def _order(self, batches: int) -> dict[str, int]:
        """Return the number and the checksum of the first items of the sampler: ``batches`` items, or all if it has fewer."""
        batches = min(batches, len(self._checksums) - 1)
        return {"batches": batches, "checksum": self._checksums[batches]}

    def store_states_after_order(self) -> None:
        """Store the current states of the generators as ``"begun"``, if ``iter(sampler)`` has drawn the order.

        In this case the ``DataLoader`` has drawn the seed of its workers after the order, and the states include this draw.
        """
        if self._order_is_drawn:
            self._start = {**(self._start or {}), "begun": states_of(self._recording.resumable.generators)}

    def state(self, batches: int | None) -> Mapping[str, Any]:
        """Return the state after ``batches`` batches: the loader's state at the beginning of this epoch, and their order.

        ``None``: the state at the end, which is the loader's current state, and under ``"last"`` the state after all batches.
        """
        resumable = self._recording.resumable
        number_read = len(self._checksums) - 1
        # Before the first batch, the state has the first item, so that another order is noticed, too.
        state = {**(self._start or {}), "order": self._order(number_read if batches is None else max(1, batches))}
        return state if batches is not None else {**resumable.state(states_of(resumable.generators)), "last": state}

    def __next__(self) -> Any:
        self.begin()
        with self._lock:
            if self._read_ahead:
                return self._read_ahead.popleft()
            if self._error is not None:
                raise self._error
            for item in self.draws_ahead.read(len(self._checksums) - 1, partial(self._read, 1)):
                return item
        raise StopIteration


_open: weakref.WeakSet[EpochIndices] = weakref.WeakSet()
"""Iterators that ``begin`` was called for, of all loaders in this process: several loaders may draw from one generator."""


def read_open_to_end(variables: Sequence[Variable]) -> list[DrawsAhead]:
    """Read the samplers of open iterations that change any of ``variables`` to their ends, and postpone their draws.

    Returns:
        The records of draws of these iterations.
    """
    found = [indices for indices in list(_open) if indices.draws_ahead.uses_any_of(variables)]
    for indices in found:
        indices.read_to_end()
    return [indices.draws_ahead for indices in found]


_LIBRARIES = ("torch", "torchdata", "accelerate")
"""Packages whose samplers depend only on their epochs, their attributes ``generator`` and torch's global generator."""


def _bytes_of(indices: Any) -> Any:
    """Return the indices of a batch, or any other item of a sampler, as bytes that are equal in all processes."""
    if type(indices) is list:
        with suppress(TypeError, OverflowError):
            return array("q", indices)  # a quarter of the time that repr takes
    return without_addresses(repr(indices)).encode()
