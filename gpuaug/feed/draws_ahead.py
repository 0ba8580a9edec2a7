"""Random numbers that a sampler draws while it is read ahead of the training loop."""

import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from gpuaug.core.rng import generator_lock


class Variable(NamedTuple):
    """Variable that a sampler changes: the state of a generator, or the epoch of a sampler."""

    owner: Any
    """The generator or sampler."""
    get: Callable[[], Any]
    set: Callable[[Any], Any]


class _Change(NamedTuple):
    """Change of a variable by one item of the sampler."""

    item: int
    """Index of the item; the number of items for the end."""
    variable: Variable
    before: Any
    """Value before the item was read."""
    after: Any
    """Value after the item was read."""


class DrawsAhead:
    """Draws of a sampler during one iteration, while a background thread reads the sampler ahead of the training loop.

    A plain ``DataLoader`` reads an item of its sampler when the training loop asks for a batch. The pulling thread reads
    further ahead, as far as time allows, and a sampler may draw random numbers whenever it is read. For example, torch's
    ``RandomSampler`` draws once more at its end. So three rules keep timing out of the random numbers:

    1. If a loop ends early, draws from the sampler's generators that a plain ``DataLoader`` would not have made are undone. So
       is the counting of epochs by a sampler that counts at its end.
    2. Global generators are read while no stage is running, which would have set them to the state of the stage.
    3. Before another iteration draws from the same generators, the sampler is read to its end, so that it draws nothing later.

    Args:
        variables: States of the sampler's generators, without global generators, from which the training loop draws, too, and
            epochs that samplers count.
        is_custom: Whether the sampler may draw from global generators after its first item. Samplers of torch do not.
    """

    def __init__(self, variables: Sequence[Variable], *, is_custom: bool) -> None:
        self.variables = variables
        self._is_custom = is_custom
        self._changes: deque[_Change] = deque()
        """Changes by items that a plain ``DataLoader`` has not read yet."""
        self._locks = False
        """Whether the sampler draws from global generators."""
        self._is_stopped = False
        self.items_before_first = sys.maxsize
        """Number of items that a plain ``DataLoader`` has read before the first call of ``next``.

        Default: no draw is undone.
        """
        self.num_returned = 0
        """Number of results of ``next`` that the training loop has received: batches, and an error or the end."""

    def read_first(self, read: Callable[[], list[Any]]) -> list[Any]:
        """Return ``read()``, which reads the first items of a sampler, and find out if they draw from global generators.

        Call on the thread that may draw from global generators.
        """
        if not self._is_custom:
            return read()
        before = _global_states()
        items = read()
        # Within a stage, the stage holds the lock, and the numbers of the sampler belong to the stage.
        self._locks = before != _global_states() and not generator_lock.in_context
        return items

    def read(self, item: int, read: Callable[[], list[Any]]) -> list[Any]:
        """Return ``read()``, which reads the item with index ``item`` of the sampler. Return an empty list after ``stop``."""
        values_before = [variable.get() for variable in self.variables]
        items = generator_lock.draw_unless(lambda: self._is_stopped, read) if self._locks else read()
        for variable, before in zip(self.variables, values_before, strict=True):
            after = variable.get()
            if not _equal(before, after):
                self._changes.append(_Change(item, variable, before, after))
        while self._changes and self._changes[0].item < self._num_plain:
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
        """Whether the iteration is open, and its sampler changes one of ``variables``."""
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
    if isinstance(value, torch.Tensor):
        return bool(value.numpy().tobytes() == other.numpy().tobytes())  # a third of the time of torch.equal
    return pickle.dumps(value) == pickle.dumps(other)  # arrays in a state of NumPy cannot be compared with ==


def _global_states() -> tuple[Any, ...]:
    """Return the states of the global generators of torch, NumPy and Python, to be compared."""
    torch_state = torch.default_generator.get_state().numpy().tobytes()
    return torch_state, pickle.dumps(np.random.get_state(legacy=False)), random.getstate()


def states_of(generators: Mapping[str, torch.Generator]) -> dict[str, torch.Tensor]:
    """Return name → state of each generator."""
    return {name: generator.get_state() for name, generator in generators.items()}


def differ(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> bool:
    """Whether the states of any generator differ."""
    return not all(torch.equal(state, after[name]) for name, state in before.items())


def set_states(generators: Mapping[str, torch.Generator], states: Mapping[str, torch.Tensor]) -> None:
    """Set the states of generators, by name. A generator without an entry in ``states`` is not changed."""
    for name, generator in generators.items():
        if name in states:
            generator.set_state(states[name])
