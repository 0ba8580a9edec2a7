"""Random numbers that a sampler draws while it is read ahead of the training loop.

A *draw* is the random numbers that a generator returns. The *pulling thread* reads batches from the wrapped loader ahead of the
training loop. A *stage* works on the batches, and sets the global generators of torch, NumPy and Python while it runs.
"""

import pickle
import random
import sys
import threading
import weakref
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from gpuaug.core.errors import GpuAugError, without_addresses
from gpuaug.core.generators import host_states
from gpuaug.core.rng import generator_lock
from gpuaug.feed.wrapped_loader import Start

GLOBAL = "torch"
"""Key of torch's global generator among the generators from which a sampler may draw."""


class Variable(NamedTuple):
    """Variable that a sampler changes: the state of a generator, or the epoch of a sampler."""

    owner: Any
    """The generator or sampler."""
    get: Callable[[], Any]
    """Function that returns the current value."""
    set: Callable[[Any], Any]
    """Function that sets the value."""


class DrawsAhead:
    """Draws of a sampler during one iteration, while a background thread reads the sampler ahead of the training loop.

    A plain ``DataLoader`` reads an item of its sampler when the training loop asks for a batch. The pulling thread reads
    further ahead, as far as time allows, and a sampler may draw random numbers whenever it is read. For example, torch's
    ``RandomSampler`` draws once more at its end. So three rules keep timing out of the random numbers:

    1. If a loop ends early, draws from the sampler's generators that a plain ``DataLoader`` would not have made are undone. The
       increase of an epoch that a sampler counts at its end is undone likewise.
    2. The sampler draws from global generators only while no stage is running, because a stage sets these generators.
    3. Before another iteration draws from the same generators, the sampler is read to its end, so that it draws nothing later.

    Args:
        variables: States of the sampler's generators, without global generators, from which the training loop draws, too, and
            epochs that samplers count.
        is_custom: Whether the sampler may draw from global generators after its first item. Samplers of torch do not.
    """

    def __init__(self, variables: Sequence[Variable] = (), *, is_custom: bool = False) -> None:
        self.variables = variables
        self._is_custom = is_custom
        self._changes: deque[tuple[int, Variable, Any, Any]] = deque()
        """(index of an item, variable that reading the item has changed, value before, value after) for each item that a plain
        ``DataLoader`` has not read yet. The index of the end is the number of items."""
        self._draws_globally = False
        """Whether the sampler draws from global generators."""
        self._is_stopped = False  # set by ``stop``
        self.items_before_first = sys.maxsize
        """Number of items that a plain ``DataLoader`` has read before the first call of ``next``.

        Default: no draw is undone.
        """
        self.num_returned = 0
        """Number of results of ``next`` that the training loop has received: batches, and an error or the end."""

    def read_first(self, read_items: Callable[[], list[Any]]) -> list[Any]:
        """Return ``read_items()``, the first items of a sampler, and find out if they draw from global generators.

        Call on the thread that may draw from global generators.
        """
        if not self._is_custom:
            return read_items()
        before = host_states()
        items = read_items()
        # Within a stage, the stage holds the lock, and the numbers of the sampler belong to the stage.
        self._draws_globally = before != host_states() and not generator_lock.in_context
        return items

    def read(self, item: int, read_items: Callable[[], list[Any]]) -> list[Any]:
        """Return ``read_items()``, which reads the sampler's item with index ``item``. Return an empty list after ``stop``."""
        values_before = [variable.get() for variable in self.variables]
        items = generator_lock.draw_unless(lambda: self._is_stopped, read_items) if self._draws_globally else read_items()
        for variable, before in zip(self.variables, values_before, strict=True):
            after = variable.get()
            if not _equal(before, after):
                self._changes.append((item, variable, before, after))
        while self._changes and self._changes[0][0] < self._num_plain:
            self._changes.popleft()
        return items or []

    def stop(self) -> None:
        """Let ``read`` wait for no stage. Call before the end of the thread that calls ``read`` is awaited."""
        self._is_stopped = True

    def undo(self) -> None:
        """Set variables to the values that a plain ``DataLoader`` would have left. Call after the thread has ended.

        A variable that another iteration, or the program, has changed since is not changed.
        """
        while self._changes:
            item, variable, before, after = self._changes.pop()
            if item >= self._num_plain and _equal(variable.get(), after):
                variable.set(before)

    def uses_any_of(self, variables: Sequence[Variable]) -> bool:
        """Return whether the iteration is open, and its sampler changes one of ``variables``."""
        owners = {id(variable.owner) for variable in variables}
        return not self._is_stopped and any(id(variable.owner) in owners for variable in self.variables)

    @property
    def _num_plain(self) -> int:
        """Number of items that a plain ``DataLoader`` would have read."""
        return self.items_before_first + self.num_returned


def generator_variables(owners: Collection[Any]) -> list[Variable]:
    """Return the states of generators that are attributes of ``owners``, without the global generators of the host."""
    global_generators = (torch.default_generator, np.random.mtrand._rand, getattr(random, "_inst", None))  # type: ignore[attr-defined]
    attributes = [getattr(owner, "__dict__", {}).values() for owner in owners]
    values = [*(getattr(owner, "generator", None) for owner in owners), *(value for group in attributes for value in group)]
    variables: list[Variable] = []
    for value in {id(value): value for value in values}.values():
        if any(value is generator for generator in global_generators) or isinstance(value, random.SystemRandom):
            continue
        if isinstance(value, torch.Generator | np.random.RandomState):
            variables.append(Variable(value, value.get_state, value.set_state))
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            variables.append(Variable(value, partial(getattr, bits, "state"), partial(setattr, bits, "state")))
        elif isinstance(value, random.Random):
            variables.append(Variable(value, value.getstate, value.setstate))
    return variables


def _equal(value: Any, other: Any) -> bool:
    """Return whether two values of a ``Variable`` are equal."""
    if isinstance(value, torch.Tensor):
        return bool(value.numpy().tobytes() == other.numpy().tobytes())  # a third of the time of torch.equal
    return pickle.dumps(value) == pickle.dumps(other)  # arrays in a state of NumPy cannot be compared with ==


def states_of(generators: Mapping[str, torch.Generator]) -> dict[str, torch.Tensor]:
    """Return name → state of each generator."""
    return {name: generator.get_state() for name, generator in generators.items()}


def set_states(generators: Mapping[str, torch.Generator], states: Mapping[str, torch.Tensor]) -> None:
    """Set the states of generators, by name. A generator without an entry in ``states`` is not changed."""
    for name, generator in generators.items():
        if name in states:
            generator.set_state(states[name])


class EpochIndices(Iterator[Any]):
    """Sampler that replaces the user's in a ``DataLoader`` for one epoch, and the iterator of this sampler.

    It reads the user's sampler, and records the states of generators.

    Args:
        source: ``IndexedSource`` of the loader.
        start: Start of the epoch.
    """

    def __init__(self, source: Any, start: Start) -> None:
        self._source = source
        self._start = start
        self.generators = {**source.generators, GLOBAL: torch.default_generator}
        self.draws_ahead = DrawsAhead(source.variables, is_custom=source.has_custom_sampler)
        self._has_other_order = False
        """Whether the order differs from the saved epoch.

        The error is raised after the ``DataLoader`` has created its iterator, whose workers can then be ended.
        """
        self._indices: Iterator[Any] = iter(())
        self._states: dict[str, torch.Tensor] = {}
        """States of the generators before the order is drawn."""
        self.order_is_drawn = False
        """Whether ``iter(sampler)`` has drawn the order. Other samplers draw when their iterator is read."""
        self._read_ahead: deque[Any] = deque()
        """Items of the sampler that ``begin`` has read and that were not returned yet."""
        self._checksums = array("I", [0])
        """Checksum of the first n items of the sampler, at index n."""
        self._errors: list[Exception] = []
        """Errors of the sampler when it was read ahead. The last is raised after the items before it."""
        self._lock = threading.Lock()
        """Lock of the sampler's iterator: the pulling thread and ``read_to_end`` read it."""
        self.start_state: dict[str, Any] = {}
        """State at the beginning of the epoch; empty before ``begin``."""

    def __len__(self) -> int:
        return len(self._source.sampler)

    def __iter__(self) -> Self:
        # A DataLoader with workers calls this method twice, and reads only the second iterator of the sampler. With a
        # ``worker_seed``, ``begin`` iterates the sampler instead, after it has set the saved states.
        if self._start.worker_seed is None and not self.start_state:
            self._iterate()
        return self

    def check_order(self) -> None:
        """Check that the order of the samples is the order of the saved epoch, if the start requires the same order.

        Raises:
            GpuAugError: If the order differs.
        """
        if self._has_other_order and self._start.same_order:
            raise GpuAugError(
                "The run cannot be resumed, because the sampler returns other batches than in the saved epoch. Use a "
                "DataLoader with the same dataset, sampler and seed. A custom sampler may depend only on its epoch and its "
                "attribute generator. To continue with another order, pass strict=False to load_state_dict."
            )

    def _iterate(self) -> None:
        """Iterate the user's sampler. It may draw now, or when its iterator is read."""
        self._states = states_of(self.generators)
        self._epochs = self._source.epochs  # a sampler that counts epochs may increase its epoch in the next line
        self._indices = iter(self._source.sampler)
        states_after = states_of(self.generators)
        self.order_is_drawn = any(not torch.equal(state, states_after[name]) for name, state in self._states.items())

    def begin(self) -> None:
        """Make the sampler draw the order, and store the state at the beginning of the epoch. A second call does nothing."""
        if self.start_state:
            return
        start = self._start
        saved = start.state or {}
        order = saved.get("order", {})
        num_compared = order.get("batches", 0)  # items whose order is compared with the saved epoch
        try:
            if start.worker_seed is not None:  # ``__iter__`` has not iterated: the order is drawn from saved states, if any
                set_states(self.generators, saved.get("generators", {}))
                self._source.epochs = saved.get("epochs", {})
                self._iterate()
            if not self.order_is_drawn:
                self._states = states_of(self.generators)
            read = partial(self._read, max(1, start.batches, num_compared))
            self._read_ahead.extend(self.draws_ahead.read_first(read))
        except Exception as error:
            self._errors.append(error)
        if torch.equal(self._states[GLOBAL], torch.default_generator.get_state()):
            del self._states[GLOBAL]  # the sampler does not draw from torch's global generator
        self.start_state = self._source.state(self._states, self._epochs)
        _open.add(self)
        if not self._errors:
            # The order of another rank differs rightly, so it is not compared.
            is_same_rank = saved.get("rank") == self.start_state["rank"]
            self._has_other_order = bool(order) and is_same_rank and order != self._order(num_compared)
            for _ in range(min(start.batches, len(self._read_ahead))):  # drop the batches to skip
                self._read_ahead.popleft()

    def read_to_end(self) -> None:
        """Read the remaining items, if their number is known."""
        length = 0
        with suppress(Exception):  # a sampler need not have a length
            length = len(self)
        with self._lock:
            try:
                # From the first item that was not read. The last index reads the end.
                for index in range(len(self._checksums) - 1, length + 1):
                    items = self.draws_ahead.read(index, partial(self._read, 1))
                    self._read_ahead.extend(items)
                    if not items:
                        return
            except Exception as error:
                self._errors.append(error)

    def _read(self, count: int) -> list[Any]:
        """Return the next ``count`` items of the user's sampler, or fewer at its end, and extend the checksums."""
        items = list(islice(self._indices, count))
        for item in items:
            self._checksums.append(zlib.crc32(_bytes_of(item), self._checksums[-1]))
        return items

    def _order(self, batches: int) -> dict[str, int]:
        """Return number and checksum of the first items of the sampler: ``batches`` items, or all read if they are fewer."""
        batches = min(batches, len(self._checksums) - 1)
        return {"batches": batches, "checksum": self._checksums[batches]}

    def state(self, batches: int | None) -> Mapping[str, Any]:
        """Return the state after ``batches`` batches: the loader's state at the beginning of this epoch, and their order.

        ``None``: the state at the end, which is the loader's current state, and under ``"last"`` the state after all batches.
        """
        number_read = len(self._checksums) - 1
        # Before the first batch, the state has the first item, so that another order is noticed, too.
        state = {**self.start_state, "order": self._order(number_read if batches is None else max(1, batches))}
        return state if batches is not None else {**self._source.state(), "last": state}

    def __next__(self) -> Any:
        self.begin()
        with self._lock:
            if self._read_ahead:
                return self._read_ahead.popleft()
            if self._errors:
                raise self._errors.pop()
            for item in self.draws_ahead.read(len(self._checksums) - 1, partial(self._read, 1)):
                return item
        raise StopIteration


_open: weakref.WeakSet[EpochIndices] = weakref.WeakSet()
"""Iterators of all loaders in this process for which ``begin`` was called: several loaders may draw from one generator."""


def read_open_to_end(variables: Sequence[Variable]) -> None:
    """Read the samplers of open iterations that change any of ``variables`` to their ends."""
    for indices in list(_open):
        if indices.draws_ahead.uses_any_of(variables):
            indices.read_to_end()


def _bytes_of(indices: Any) -> Any:
    """Return the indices of a batch, or any other item of a sampler, as bytes that are equal in all processes."""
    if type(indices) is list:
        with suppress(TypeError, OverflowError):
            return array("q", indices)  # a quarter of the time that repr takes
    return without_addresses(repr(indices)).encode()
