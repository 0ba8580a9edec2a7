"""Epochs that begin at a later batch, of loaders that need not load the batches before it: lists, and ``DataLoader`` by index.

The order of a ``DataLoader``'s epoch follows from its sampler and the generators that this draws from. So an epoch is described
by their states at its beginning. To go on with it, the sampler is asked again in these states, and the indices of the batches
that the training loop has had are dropped. No sample is loaded for that.
"""

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from gpuaug.core.errors import GpuAugError
from gpuaug.core.rng import default_rank
from gpuaug.feed.wrapped_loader import StateReader, as_int, end_workers, is_stateful, iterated_as, parts

_GLOBAL = "torch"
"""Key of torch's global generator among the generators that a sampler may draw from."""


class Resume(NamedTuple):
    """Where the next epoch of a loader begins."""

    batches: int
    """Number of batches that are left out."""
    seed: int | None
    """Seed from which workers' seeds are drawn. ``None``: they are drawn as ever."""
    start: Mapping[str, Any] | None
    """The state at the epoch's beginning. ``None``: the present one, before seeds of workers are drawn from the generator."""
    same_order: bool
    """Whether another order than that of ``start`` is an error."""


def is_resumable(loader: Any) -> bool:
    """Whether an epoch of ``loader`` can begin at any batch without loading earlier ones."""
    if type(loader) in {list, tuple}:
        return True
    if not isinstance(loader, DataLoader) or is_stateful(loader) or not iterated_as(loader, DataLoader):
        return False
    # With in_order=False the batches that were handed over are not the first ones. An iterator gives its indices once.
    by_index = not isinstance(loader.dataset, IterableDataset) and getattr(loader, "in_order", True)
    return by_index and not isinstance(_index_sampler(loader), Iterator)


_ENTRIES: dict[str, Any] = {"settings": int | str | None, "epochs": int, "generators": torch.Tensor, "begun": torch.Tensor}
"""Types of the values in a state's mappings, whose keys are names. ``"begun"`` may be left out."""


def is_state(state: Any) -> bool:
    """Whether ``state`` is of a loader that ``is_resumable``."""
    return (
        isinstance(state, Mapping)
        and isinstance(state.get("rank"), int)
        and isinstance(state.get("first", 0), int)
        and all(_maps_names(state.get(name, {} if name == "begun" else None), kind) for name, kind in _ENTRIES.items())
    )


def _maps_names(entries: Any, kind: Any) -> bool:
    """Whether ``entries`` maps names to values of one kind, whole numbers of 64 bits at most."""
    return isinstance(entries, Mapping) and all(
        isinstance(name, str) and isinstance(value, kind) and not (isinstance(value, int) and value.bit_length() > 63)
        for name, value in entries.items()
    )


class ResumableLoader:
    """The state that a loader's batches follow from, and the beginning of its epochs.

    Args:
        loader: The user's, which ``is_resumable``.
    """

    def __init__(self, loader: Any) -> None:
        self._by_index = isinstance(loader, DataLoader)
        # Not the loader itself, which may hold an iterator that holds this.
        self._dataset: Any = loader.dataset if self._by_index else loader
        self.sampler: Any = _index_sampler(loader) if self._by_index else None
        """Sampler of the loader: its batch sampler, or its sampler where there are no batches."""
        names = [type(each).__name__ for each in (self.sampler, getattr(loader, "sampler", None))]
        self._names = " of ".join(dict.fromkeys(names))
        paths = parts(loader) if self._by_index else {}
        self._with_epoch = {
            path: part
            for path, part in paths.items()
            if callable(getattr(part, "set_epoch", None)) and as_int(getattr(part, "epoch", None)) is not None
        }
        self.generators: dict[str, torch.Generator] = {}
        """The generators that the sampler and the workers' seeds are drawn from, torch's global one aside."""
        for path, part in paths.items():
            found = getattr(part, "generator", None)
            others = (torch.default_generator, *self.generators.values())
            if path != "dataset" and isinstance(found, torch.Generator) and not any(found is other for other in others):
                self.generators[path or "loader"] = found
        self._rank = _attribute("rank", paths.values())
        self.ranks = _attribute("num_replicas", paths.values())
        """The number of ranks that a sampler divides the dataset among, or ``None`` where none does."""

    def settings(self) -> dict[str, Any]:
        """Settings that decide the batches of an epoch besides its order, by name."""
        samples = None
        with suppress(Exception):  # a dataset need not know
            samples = len(self._dataset)
        if not self._by_index:
            return {"batches": samples}
        return {
            "samples": samples,
            "batch_size": _plain(getattr(self.sampler, "batch_size", None)),
            "drop_last": _plain(getattr(self.sampler, "drop_last", None)),
            "sampler": self._names,
            "generators": ", ".join(self.generators) or "none",
        }

    @property
    def epochs(self) -> dict[str, int | None]:
        """Epochs of samplers, by path. Assign to set them; samplers that are not named keep theirs."""
        return {path: as_int(part.epoch) for path, part in self._with_epoch.items()}

    @epochs.setter
    def epochs(self, value: Mapping[str, int | None]) -> None:
        for path, part in self._with_epoch.items():
            if path in value:
                part.set_epoch(value[path])

    def state(self, generators: Mapping[str, torch.Tensor], epochs: Mapping[str, int | None] | None = None) -> dict[str, Any]:
        """The state of the loader, of plain values, these states of generators and ``epochs``, by default the present ones."""
        rank = default_rank() if self._rank is None else self._rank
        epochs = dict(self.epochs if epochs is None else epochs)
        return {"settings": self.settings(), "rank": rank, "epochs": epochs, "generators": dict(generators)}

    def accepts(self, state: Any) -> bool:
        """Whether ``state`` is one of a loader of this kind, which ``put_back`` and ``begin`` can take."""
        if not is_state(state):
            return False
        with suppress(TypeError, RuntimeError):
            for name, value in (*state["generators"].items(), *state.get("begun", {}).items()):
                torch.Generator(self.generators.get(name, torch.default_generator).device).set_state(value)
            return True
        return False

    def put_back(self, state: Mapping[str, Any], *, ended: bool) -> None:
        """Tell samplers their epoch. At an epoch's end, which the next one follows, also set the generators."""
        self.epochs = state["epochs"]
        if ended:
            set_states(self.generators, state["generators"])

    def begin(self, loader: Any, resume: Resume | None) -> tuple[Iterator[Any], StateReader]:
        """Begin an epoch, on the thread that may draw from torch's global generator.

        Args:
            loader: The user's, or a copy of it.
            resume: Where the epoch begins, if not at its first batch.

        Returns:
            The iterator, and what reads the state.

        Raises:
            GpuAugError: If the sampler gives another order than that of the epoch that is resumed.
        """
        if not self._by_index:
            state = self.state({})
            return islice(iter(loader), resume.batches if resume is not None else 0, None), lambda _ended: state
        iterator, indices = self.begin_recorded(loader, resume)
        return iterator, indices.state

    def begin_recorded(self, loader: Any, resume: Resume | None) -> "tuple[Iterator[Any], EpochIndices]":
        """Begin an epoch of a ``DataLoader`` by index.

        Args:
            loader: The user's, or a copy of it.
            resume: Where the epoch begins, if not at its first batch.

        Returns:
            The iterator, and the indices that it reads.

        Raises:
            GpuAugError: If the sampler gives another order than that of the epoch that is resumed.
        """
        indices = _Indices(self, self.sampler, resume)
        found = states_of(indices.generators)
        try:
            if resume is not None and resume.seed is not None:  # else workers would repeat the draws of an earlier epoch
                (loader.generator or torch.default_generator).manual_seed(resume.seed)
            if resume is not None and resume.start is not None:
                indices.states = resume.start["generators"]
                indices.epochs = resume.start["epochs"]
            else:
                indices.states = found
            with _asked(loader, indices):
                iterator = iter(loader)
                indices.newest.begin()
            if indices.refusal is not None:
                end_workers(iterator)
                loader._iterator = None
                raise indices.refusal
        except BaseException:
            if resume is not None:
                set_states(indices.generators, found)
            raise
        if resume is not None and resume.start is not None:
            # The user's program drew for this epoch before it was stopped, and does not draw again.
            own = self.generators.keys() & resume.start["generators"].keys()
            set_states(indices.generators, {name: found[name] for name in found if name not in own})
            set_states(self.generators, resume.start.get("begun", {}))
        if not loader.num_workers:
            indices.newest.note_begun()
        return iterator, indices.newest


class _Indices:
    """A ``DataLoader``'s sampler, which records the generators' states when it is iterated."""

    def __init__(self, resumable: ResumableLoader, sampler: Any, resume: Resume | None) -> None:
        self.resumable = resumable
        self.resume = resume
        self.generators = {**resumable.generators, _GLOBAL: torch.default_generator}
        self.states: Mapping[str, torch.Tensor] = {}
        """The states that generators are given before the sampler is asked."""
        self.epochs: Mapping[str, int | None] = resumable.epochs
        """The epochs that samplers are given then."""
        self.refusal: GpuAugError | None = None
        """Raised once the ``DataLoader`` has its iterator: workers would outlive an earlier error."""
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> "EpochIndices":
        # A DataLoader with workers calls this twice, and reads the second iterator.
        self.newest = EpochIndices(self)
        return self.newest

    def ask(self) -> Iterator[Any]:
        """An iterator of the user's sampler, which may draw now or when it is read."""
        return iter(self._sampler)


class EpochIndices(Iterator[Any]):
    """The indices of one epoch."""

    def __init__(self, asked: _Indices) -> None:
        self._asked = asked
        self._before = states_of(asked.generators)
        self._epochs = asked.resumable.epochs
        self._indices = asked.ask()  # a sampler that counts epochs may do so now
        self._drawn = _differ(self._before, states_of(asked.generators))
        self._first: list[Any] = []
        self._error: Exception | None = None
        self._start: Mapping[str, Any] | None = None

    def begin(self) -> None:
        """Make the sampler draw the order, if it has not."""
        if self._start is not None:
            return
        asked = self._asked
        resume = asked.resume
        asked.resume = None  # workers that persist ask again in later epochs
        before = self._before if self._drawn else states_of(asked.generators)
        try:
            if resume is not None and (resume.seed is not None or resume.start is not None):
                set_states(asked.generators, asked.states)
                asked.resumable.epochs = asked.epochs
                self._epochs = asked.resumable.epochs
                before = states_of(asked.generators)
                self._indices = asked.ask()
            self._first = list(islice(self._indices, 1))
        except Exception as error:
            self._error = error  # raised where the indices are read
        if torch.equal(before[_GLOBAL], torch.default_generator.get_state()):
            del before[_GLOBAL]
        checksum = zlib.crc32(_ADDRESS.sub("", repr(self._first)).encode())
        start = self._start = {**asked.resumable.state(before, self._epochs), "first": checksum}
        if resume is None or self._error is not None:
            return
        then = resume.start
        if resume.same_order and then is not None and then["rank"] == start["rank"] and then.get("first") != checksum:
            asked.refusal = GpuAugError(
                "The epoch cannot be resumed, because the sampler gives another first batch than it had. Give the DataLoader "
                "the same dataset, sampler and seed; a sampler of your own must draw from nothing but its epoch and "
                "its attribute generator. To have other batches, pass strict=False to load_state_dict."
            )
        if resume.batches:
            self._first = list(islice(self._indices, resume.batches - 1, resume.batches))

    def note_begun(self) -> None:
        """Keep the states of the generators now that the epoch has begun, if more was drawn after the order."""
        if self._drawn:  # a DataLoader draws its workers' seed after it has asked a sampler, which may draw at once
            self._start = {**(self._start or {}), "begun": states_of(self._asked.resumable.generators)}

    def state(self, ended: bool) -> Mapping[str, Any]:
        """The state of the loader as this epoch began, or as it is now at its end."""
        resumable = self._asked.resumable
        return resumable.state(states_of(resumable.generators)) if ended else self._start or {}

    def __next__(self) -> Any:
        self.begin()
        if self._error is not None:
            raise self._error
        return self._first.pop() if self._first else next(self._indices)


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_MOST_TEXT = 200  # characters of a setting that a state keeps


def states_of(generators: Mapping[str, torch.Generator]) -> dict[str, torch.Tensor]:
    """The states of generators, by name."""
    return {name: generator.get_state() for name, generator in generators.items()}


def _differ(some: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> bool:
    return not all(torch.equal(state, others[name]) for name, state in some.items())


def set_states(generators: Mapping[str, torch.Generator], states: Mapping[str, torch.Tensor]) -> None:
    """Set the states of generators, by name. Names without a state are left out."""
    for name, generator in generators.items():
        if name in states:
            generator.set_state(states[name])


def _index_sampler(loader: Any) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _attribute(name: str, parts: Iterable[Any]) -> int | None:
    found = (as_int(getattr(part, name, None)) for part in parts)
    return next((value for value in found if value is not None), None)


def _plain(value: Any) -> bool | int | str | None:
    """A sampler's setting as a value that a state may hold: text, for what is neither a flag nor a whole number."""
    if value is None or isinstance(value, bool):
        return value
    number = as_int(value)
    return _ADDRESS.sub("", repr(value))[:_MOST_TEXT] if number is None else number


@contextmanager
def _asked(loader: Any, indices: _Indices) -> Iterator[None]:
    """A block in which ``loader`` has ``indices`` for its sampler."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    own = vars(loader)[name]

    def have(sampler: Any) -> None:
        vars(loader)[name] = sampler  # past DataLoader's __setattr__, which refuses
        if loader._iterator is not None:  # workers that persist
            loader._iterator._index_sampler = sampler

    have(indices)
    try:
        yield
    finally:
        have(own)
