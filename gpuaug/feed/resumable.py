"""``Source``: adapter that begins and resumes the epochs of a wrapped loader.

``IndexedSource`` resumes an epoch at a later batch without loading earlier batches, for lists and for a ``DataLoader`` *by
index*, that is, with a map-style dataset. The order of an epoch depends on the sampler and on the generators from which the
sampler draws, so the states of these generators at the beginning of the epoch describe the epoch. To resume the epoch, the
sampler is iterated again from these states, and the indices of the batches that were processed are dropped. No sample is loaded
for dropped indices. The checksum of the dropped indices is compared with the saved state.
"""

import copy
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from gpuaug.core.errors import ArgumentError, shown
from gpuaug.core.rng import default_rank, generator_lock
from gpuaug.core.settings import default_device
from gpuaug.feed.draws_ahead import (
    GLOBAL,
    DrawsAhead,
    EpochIndices,
    Variable,
    generator_variables,
    read_open_to_end,
    set_states,
    states_of,
)
from gpuaug.feed.wrapped_loader import (
    START_WITH_NEW_WORKERS,
    IteratorAndReader,
    Start,
    as_int,
    attribute_of,
    begin_after,
    end_workers,
    has_state_methods,
    index_sampler,
    is_stateful,
    parts,
    plain_value,
    replaced,
    uses_iteration_of,
)


class Source:
    """Adapter of a wrapped loader that has no state, or that stores its state itself. Base class of other adapters.

    The loader is an argument of the methods, not an attribute: it may refer to an iterator that refers to this object, a
    reference cycle.

    Args:
        loader: The user's loader.
    """

    ranks: int | None = None
    """Number of ranks among which a sampler divides the dataset; ``None`` without such a sampler."""
    begins_anywhere = False
    """Whether an epoch can begin at any batch without loading earlier batches."""
    variables: Sequence[Variable] = ()
    """Variables that samplers of the loader change: states of generators, and epochs of samplers."""

    def __init__(self, loader: Any) -> None:
        self.has_state = is_stateful(loader)
        """Whether the state can be saved and loaded."""
        self.draws_ahead = DrawsAhead()
        """Draws of the sampler in the newest epoch; without entries if only the loader reads its sampler."""
        # A DataLoader stores its position in its iterators: the next iterator begins at the first batch or at a loaded state.
        is_dataloader = isinstance(getattr(loader, "base_dataloader", loader), DataLoader)
        self.stores_position = self.has_state and not is_dataloader
        """Whether the loader itself, instead of its iterator, stores the position of an iteration."""

    def begin(self, loader: Any, start: Start) -> IteratorAndReader:
        """Begin an epoch. Call on the thread that may draw from torch's global generator.

        Args:
            loader: The user's loader, or its proxy, a second object with other attributes for workers.
            start: Start of the epoch, as returned by ``load``.

        Returns:
            The iterator, and a function that reads the state.

        Raises:
            GpuAugError: If the order of the sampler differs from the order of the resumed epoch.
        """
        return begin_after(loader, start.batches)

    def accepts(self, state: Any) -> bool:
        """Return whether ``state`` is a state of this type of loader. Otherwise ``load`` would fail."""
        return not is_index_state(state)

    def check(self, loader: Any, state: Any) -> None:
        """Check that ``load`` can load ``state``.

        Raises:
            ArgumentError: If ``state`` belongs to another type of loader; for torchdata's loader, also if its number of workers
                differs.
        """
        if not self.accepts(state):
            name = type(loader).__name__
            raise ArgumentError(
                f"state['source'] must be the state of a {name}, got {shown(state)}. "
                f"Pass what state_dict() of a StreamedLoader around a {name} returned."
            )

    def index_state(self, state: Any) -> Mapping[str, Any] | None:
        """Return the part of ``state`` that describes the order of the samples; ``None`` if it is unknown."""
        return None

    def settings(self) -> dict[str, Any]:
        """Return name → value of the settings, other than the order, on which the batches of an epoch depend."""
        return {}

    def state_before_first(self, loader: Any) -> Any:
        """Return the state before the first batch of the first epoch; ``None`` if only ``loader.state_dict`` returns it."""
        return None

    def is_before_first(self, state: Any) -> bool:
        """Return whether ``state`` is from before the first batch. Then ``restart`` loads it, instead of ``load``."""
        return state is None

    def can_restart(self, loader: Any) -> bool:
        """Return whether the first epoch can begin anew by ``restart`` after batches were read.

        It cannot if an object in this process stores a position that ``restart`` does not reset.
        """
        return self.begins_anywhere

    def restart(self, loader: Any, state: Any) -> None:
        """Load ``state``, which is from before the first batch. Call after workers have ended. Default: nothing to load."""

    def load(self, loader: Any, state: Any, start: Start, *, ended: bool) -> Start:
        """Load a state, and return the start of the next epoch.

        Args:
            loader: The user's loader.
            state: The state.
            start: Number of batches of the epoch that were handed over, and whether another order is an error.
            ended: Whether the state is from the end of an epoch.
        """
        if state is not None:
            loader.load_state_dict(copy.deepcopy(state))
        # Without start.batches: the loader itself goes on after the batches of its state.
        return Start(state=state, same_order=start.same_order)

    def discard(self, loader: Any) -> bool:
        """Let the next epoch begin at its first batch, instead of the loaded state. Return false if this is not possible."""
        return False


def is_by_index(loader: Any) -> bool:
    """Return whether ``loader`` is a list or tuple, or a ``DataLoader`` of a map-style dataset whose sampler can be replaced.

    The sampler cannot be replaced if the loader has a state of its own, or overrides the iteration.
    """
    if not isinstance(loader, DataLoader) or is_stateful(loader) or not uses_iteration_of(loader, DataLoader):
        return type(loader) in {list, tuple}
    return not isinstance(loader.dataset, IterableDataset)


def is_index_state(state: Any) -> bool:
    """Return whether ``state`` has the keys of a state of ``IndexedSource``."""
    return isinstance(state, Mapping) and {"settings", "rank", "epochs", "generators"} <= state.keys()


class IndexedSource(Source):
    """Adapter of a list, or of a ``DataLoader`` of a map-style dataset.

    A state of a ``DataLoader`` during an epoch describes the beginning of the epoch: ``"settings"``, ``"rank"``, ``"epochs"``
    and ``"generators"`` (see ``state``). ``EpochIndices`` adds ``"order"``, the number and the checksum of the items of the
    sampler so far. ``begin`` may add ``"begun"``, the states of generators after the iterator was created. A state at the end
    of an epoch describes the end, and has under ``"last"`` the state after all batches of this epoch.

    Args:
        loader: The user's loader.
    """

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._is_dataloader = isinstance(loader, DataLoader)
        self._dataset: Any = loader.dataset if self._is_dataloader else loader
        self.sampler: Any = index_sampler(loader) if self._is_dataloader else None
        """Batch sampler of the loader, or its sampler if it has no batch sampler."""
        # An epoch cannot be resumed with in_order=False, because the batches that were processed may not be the first of the
        # epoch, or if the sampler is an iterator, because it can be iterated only once.
        self.has_state = self.begins_anywhere = getattr(loader, "in_order", True) and not isinstance(self.sampler, Iterator)
        names = [type(sampler).__name__ for sampler in (self.sampler, getattr(loader, "sampler", None))]
        self._sampler_names = " of ".join(dict.fromkeys(names))  # such as "BatchSampler of RandomSampler"
        parts_by_path = parts(loader) if self._is_dataloader else {}
        self._parts_with_epoch = {
            path: part
            for path, part in parts_by_path.items()
            if callable(getattr(part, "set_epoch", None)) and as_int(getattr(part, "epoch", None)) is not None
        }
        self.generators = generators_of({path or "loader": part for path, part in parts_by_path.items() if path != "dataset"})
        """Attribute path → generator of a sampler, or of the loader, from which seeds of workers are drawn.

        Torch's global generator is omitted.
        """
        samplers = [part for path, part in parts_by_path.items() if path not in ("", "dataset")]
        custom_samplers = [part for part in samplers if type(part).__module__.partition(".")[0] not in _LIBRARIES]
        self.has_custom_sampler = bool(custom_samplers)
        """Whether the loader has a sampler that is not of ``_LIBRARIES``."""
        # Whether persistent_workers changes the order. torch draws the seeds of workers from the loader's generator, which may
        # also be a sampler's: once for persistent workers, else once per epoch. For persistent workers, torchdata also creates
        # one more iterator of the sampler. A generator ``None`` is torch's global one; ``self`` stands for no generator.
        order_depends_on_workers = any(getattr(part, "generator", self) is loader.generator for part in samplers) or (
            is_stateful(loader) and not isinstance(self._dataset, IterableDataset)
        )
        self._worker_settings = {"persistent_workers": loader.persistent_workers} if order_depends_on_workers else {}
        self.variables = [
            *generator_variables([loader, *samplers] if self._is_dataloader else []),
            *(Variable(part, partial(getattr, part, "epoch"), part.set_epoch) for part in self._parts_with_epoch.values()),
        ]
        self.has_custom_sampler_with_state = any(has_state_methods(part) for part in custom_samplers)
        """Whether a sampler that is not of ``_LIBRARIES`` has ``state_dict`` and ``load_state_dict``."""
        self._rank = attribute_of("rank", parts_by_path.values())
        self.ranks = attribute_of("num_replicas", parts_by_path.values())

    def settings(self) -> dict[str, Any]:
        """Return name → value of the settings on which, besides the order of the samples, the batches of an epoch depend."""
        length = None
        with suppress(Exception):  # a dataset need not have a length
            length = len(self._dataset)
        if not self._is_dataloader:
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

    def state(
        self, generators: Mapping[str, torch.Tensor] | None = None, epochs: Mapping[str, int | None] | None = None
    ) -> dict[str, Any]:
        """Return the state of the loader.

        Args:
            generators: Attribute path → state of each generator. Default: the current states.
            epochs: Attribute path → epoch of each sampler. Default: the current epochs.
        """
        rank = default_rank() if self._rank is None else self._rank
        generators = states_of(self.generators) if generators is None else generators
        epochs = self.epochs if epochs is None else epochs
        return {"settings": self.settings(), "rank": rank, "epochs": epochs, "generators": generators}

    def accepts(self, state: Any) -> bool:
        """Return whether ``state`` is a state of this type of loader."""
        if not is_index_state(state):
            return False
        with suppress(AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError):
            for part in (state, state.get("last", state)):
                array("q", [part["rank"], *part["epochs"].values(), *part.get("order", {}).values()])  # raises for other values
                for name, value in (*part["generators"].items(), *part.get("begun", {}).items()):
                    torch.Generator(self.generators.get(name, torch.default_generator).device).set_state(value)
            return all(isinstance(value, int | str | None) for value in state["settings"].values())
        return False

    def index_state(self, state: Any) -> Mapping[str, Any] | None:
        """Return ``state``."""
        return state  # type: ignore[no-any-return]

    def state_before_first(self, loader: Any) -> Any:
        """Return the state before the first batch of the first epoch."""
        return self.state()

    def is_before_first(self, state: Any) -> bool:
        """Return whether ``state`` is from before the first batch. Later states describe the order."""
        return state is None or "order" not in state

    def restart(self, loader: Any, state: Any) -> None:
        """Set generators and the epochs of samplers to ``state``."""
        if state is not None:
            self.epochs = state["epochs"]
            set_states(self.generators, state["generators"])

    def load(self, loader: Any, state: Any, start: Start, *, ended: bool) -> Start:
        """Set the epochs of samplers, and return the start of the next epoch.

        For a state at the end of an epoch, set generators, too. Otherwise, ``begin`` sets them.
        """
        self.epochs = state["epochs"]
        if not ended:  # with a worker_seed that is not None, begin draws the order of the saved epoch
            return start._replace(worker_seed=0, state=state.get("last", state))
        with generator_lock:  # the sampler may draw from torch's global generator
            self.restore_end(state, same_order=start.same_order)
        return START_WITH_NEW_WORKERS if getattr(loader, "persistent_workers", False) else Start()

    def discard(self, loader: Any) -> bool:
        """Return true: the next epoch begins at the loaded state only if the state is passed to ``begin``."""
        return True

    def restore_end(self, state: Mapping[str, Any], *, same_order: bool) -> None:
        """Set generators, and attributes of a custom sampler, to their values at the end of the epoch of ``state``.

        A custom sampler may, for example, count its iterations, or draw from other generators than ``generators``. Therefore it
        is iterated once more from the beginning of that epoch to the end. Call on the thread that may draw from torch's global
        generator. The epochs of samplers are not changed.

        Args:
            state: State at the end of an epoch.
            same_order: Whether to raise an error if the order of the samples differs from the saved epoch.

        Raises:
            GpuAugError: If the order differs.
        """
        if self.has_custom_sampler and "last" in state:
            indices = EpochIndices(self, Start(worker_seed=0, state=state["last"], same_order=same_order))
            epochs = self.epochs
            states_before = states_of(indices.generators)
            try:
                deque(indices, maxlen=0)  # iterates, and stores nothing
            finally:
                self.epochs = epochs
                set_states(indices.generators, states_before)
            indices.check_order()
        set_states(self.generators, state["generators"])

    def begin(self, loader: Any, start: Start) -> IteratorAndReader:
        """Begin an epoch. Call on the thread that may draw from torch's global generator.

        Args:
            loader: The user's loader, or its proxy, a second object with other attributes for workers.
            start: Start of the epoch.

        Returns:
            The iterator, and a function that reads the state.

        Raises:
            GpuAugError: If the order of the sampler differs from the order of the resumed epoch.
        """
        if not self._is_dataloader:
            state = self.state()
            return islice(iter(loader), start.batches, None), lambda _ended: state
        indices = EpochIndices(self, start)
        self.draws_ahead = indices.draws_ahead
        read_open_to_end(self.variables)  # later, other open iterations must not draw from the same generators
        states_before = states_of(indices.generators)
        iterator = None
        replacements: dict[str, Any] = {"sampler" if loader.batch_sampler is None else "batch_sampler": indices}
        if start.worker_seed is not None:
            device = default_device() if loader.generator is None else loader.generator.device
            replacements["generator"] = torch.Generator(device).manual_seed(start.worker_seed)
        try:
            with replaced(loader, **replacements):
                if loader._iterator is not None:  # of persistent workers
                    loader._iterator._index_sampler = indices
                iterator = iter(loader)
                indices.begin()
            if loader._iterator is not None:
                loader._iterator._index_sampler = self.sampler  # like the loader, which ``replaced`` has restored
            indices.check_order()
        except BaseException:
            end_workers(iterator)
            loader._iterator = None
            set_states(indices.generators, states_before)
            raise
        if start.state is not None:
            # The order was drawn from saved states: give the program's global state back.
            set_states({GLOBAL: torch.default_generator}, states_before)
            set_states(self.generators, start.state.get("begun", {}))
        if indices.order_is_drawn and not loader.num_workers:
            # After the order was drawn, the DataLoader has drawn a seed for workers, even without workers. A resumed epoch
            # draws this seed from another generator, so these states restore the effect of the draw.
            indices.start_state["begun"] = states_of(self.generators)
        num_prefetched = loader.num_workers * (loader.prefetch_factor or 0)
        indices.draws_ahead.items_before_first = start.batches + iterator._num_yielded + num_prefetched
        return iterator, lambda ended: indices.state(None if ended else start.batches + iterator._num_yielded)


def generators_of(owners: Mapping[str, Any]) -> dict[str, torch.Generator]:
    """Return name → attribute ``generator`` of each owner. A generator occurs once; torch's global generator is omitted."""
    generators = {name: getattr(owner, "generator", None) for name, owner in owners.items()}
    names = {id(generator): name for name, generator in reversed(generators.items()) if isinstance(generator, torch.Generator)}
    names.pop(id(torch.default_generator), None)
    return {name: generators[name] for name in generators if name in names.values()}  # type: ignore[misc]


_LIBRARIES = ("torch", "torchdata", "accelerate")
"""Packages whose samplers depend only on their epochs, their attributes ``generator`` and torch's global generator."""
