"""Exact epochs of torchdata's ``StatefulDataLoader`` and graphs of nodes, in addition to the state that they keep themselves.

torchdata saves how many indices a sampler gave, and asks the sampler for as many again. They are those of the epoch only if the
sampler has a state, so the states of generators at the beginning of the epoch are kept beside torchdata's, and put back. Of a
stream without a state torchdata counts batches twice once it has read them again: its state is here that of the beginning of
the epoch, with a number of batches to drop. Streams of Hugging Face's that were given a state begin all later epochs there.
"""

import copy
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset

from gpuaug.core.errors import ArgumentError
from gpuaug.feed.resumable import ResumableLoader, Resume, set_states, states_of
from gpuaug.feed.wrapped_loader import (
    Begun,
    StateReader,
    drop_first,
    end_workers,
    has_persistent_workers,
    has_state,
    state_reader,
)

_BESIDE = "gpuaug_order"
"""Key, in torchdata's state, of what is kept beside it."""


class StatefulLoader:
    """The state of a ``StatefulDataLoader``, and the beginning of its epochs.

    Args:
        loader: The user's.
    """

    def __init__(self, loader: Any) -> None:
        self._parts = ResumableLoader(loader)
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._asks = not self._is_stream and not has_state(loader.batch_sampler) and not has_state(loader.sampler)
        self._same_order = True
        self._resumed = False
        """Whether the last epoch began from a state."""

    def accepts(self, source: Any) -> bool:
        """Whether ``begin`` can take ``source`` from the loader that was given it."""
        return not isinstance(source, Mapping) or _BESIDE not in source or self._parts.accepts(source[_BESIDE])

    def put_back(self, source: Any, *, same_order: bool) -> None:
        """Tell samplers and the stream their epoch in a state that the loader was given.

        Args:
            source: The state.
            same_order: Whether another order than that of the epoch that is resumed is an error.
        """
        self._same_order = same_order
        if isinstance(source, Mapping) and _BESIDE in source:
            self._parts.epochs = source[_BESIDE]["epochs"]

    @staticmethod
    def forget(loader: Any) -> None:
        """Have the next epoch begin at its first batch, if the loader was given a state."""
        loader.next_iter_state = None

    def begin(self, loader: Any, skip: int) -> Begun:
        """Begin an epoch, on the thread that may draw from torch's global generator.

        Args:
            loader: The user's.
            skip: Number of batches that are left out, behind those that the state of the loader leaves out.

        Raises:
            ArgumentError: If persistent workers cannot load the state of the dataset.
            GpuAugError: If the sampler gives another order than that of the epoch that is resumed.
        """
        if self._resumed and _is_hugging_faces(loader.dataset):
            _begin_anew(loader)
        given: Any = loader.next_iter_state
        beside: Any = given.get(_BESIDE) if isinstance(given, Mapping) else None
        finished = beside is not None and given["_iterator_finished"]
        if finished and self._loads_ended(loader) and has_persistent_workers(loader):
            raise ArgumentError(
                "persistent_workers must be False to go on from the end of an epoch where the dataset has a state, got True: "
                "torchdata's persistent workers read on while they load it. Leave it out in the StatefulDataLoader."
            )
        if finished and not self._loads_ended(loader):
            if not self._is_stream and given.get("dataset_state") is not None:
                loader.dataset.load_state_dict(given["dataset_state"])
            self._put_at_end(beside)
            given = beside = loader.next_iter_state = None
        self._resumed = given is not None
        if self._asks and (given is None) is (beside is None) and not loader._initial_iter_for_state_dict:
            resume = None if beside is None else Resume(0, None, beside, self._same_order)
            if finished and has_persistent_workers(loader):
                resume = Resume(0, 0, None, False)  # their seeds were drawn in an earlier epoch
            iterator, indices = self._parts.begin_recorded(loader, resume)
            return drop_first(iterator, skip), self._reader(state_reader(loader, iterator), indices.state)
        iterator = iter(loader)
        if beside is not None:
            set_states(self._parts.generators, beside["generators"])
        begun = self._state()
        read = state_reader(loader, iterator)
        known = given is None or (beside is not None and "batches" in beside)
        if self._is_stream and known and (self._is_reread(loader) or _has_none(read(False))):
            return self._begin_reread(iterator, read, skip, given, begun)
        if _is_hugging_faces(loader.dataset) and given is None:
            read = _until_first(iterator, read)
        return drop_first(iterator, skip), self._reader(read, lambda ended: self._state() if ended else begun)

    def _state(self) -> dict[str, Any]:
        return self._parts.state(states_of(self._parts.generators))

    def _reader(self, read: StateReader, beside: StateReader) -> StateReader:
        """Reads torchdata's state with what is kept beside it."""

        def read_both(ended: bool) -> Any:
            source = read(ended)
            return source if isinstance(source, Exception) else {**source, _BESIDE: {**beside(ended), "ended": ended}}

        return read_both

    def _begin_reread(self, iterator: Any, read: StateReader, skip: int, given: Any, begun: Mapping[str, Any]) -> Begun:
        """A stream that is read from its beginning: its state is that of the beginning, and the number of batches to drop."""
        at_start = _without_streams(read(False) if given is None else given)
        batches = 0 if given is None else given[_BESIDE]["batches"]

        def read_start(ended: bool) -> Any:
            source = read(True) if ended else at_start
            beside = self._state() if ended else begun
            return {**source, _BESIDE: {**beside, "ended": ended, "batches": max(batches, iterator._num_yielded)}}

        return drop_first(iterator, batches + skip), read_start

    def _put_at_end(self, beside: Mapping[str, Any]) -> None:
        """Set generators to the end of the epoch of a state."""
        generators = self._parts.generators
        found = torch.get_rng_state()
        set_states(generators, beside["generators"])
        if self._asks and not beside["ended"]:  # of its last batch, as in checkpoints of Accelerate's, which has told the epoch
            epochs = self._parts.epochs
            deque(self._parts.sampler, maxlen=0)
            self._parts.epochs = epochs
            set_states(generators, beside.get("begun", {}))
            torch.set_rng_state(found)

    def _loads_ended(self, loader: Any) -> bool:
        """Whether the dataset is given the state that it had at the end of an epoch by torchdata."""
        if self._is_stream:
            return has_state(loader.dataset) and not _is_hugging_faces(loader.dataset)
        return has_state(loader.dataset) and has_persistent_workers(loader)

    @staticmethod
    def _is_reread(loader: Any) -> bool:
        return _is_hugging_faces(loader.dataset) and _shuffles_in_memory(loader.dataset)


def is_graph(loader: Any) -> bool:
    """Whether it is a ``Loader`` of torchdata's nodes."""
    return any(kind.__module__ == "torchdata.nodes.loader" for kind in type(loader).__mro__)


def begin_graph(loader: Any, skip: int) -> Begun:
    """Begin an epoch of a graph of torchdata's nodes, whose samplers are asked again for as many indices as they gave.

    The generators of samplers are put back for that. One without a generator draws from torch's, on the thread that pulls.

    Args:
        loader: The user's ``Loader``.
        skip: Number of batches that are left out, behind those that the state of the loader leaves out.
    """
    samplers = [node.sampler for node in _nodes(loader.root) if hasattr(node, "sampler")]
    generators = {
        f"{number}{depth}": generator
        for number, sampler in enumerate(samplers)
        for depth, each in (("", sampler), (".sampler", getattr(sampler, "sampler", None)))
        if isinstance(generator := getattr(each, "generator", None), torch.Generator)
    }
    given = loader._next_iter_state_dict
    beside = given.get(_BESIDE, {}) if isinstance(given, Mapping) else {}
    set_states(generators, beside.get("generators", {}))
    start = states_of(generators)
    iterator = iter(loader)
    if beside.get("ended") and not loader.restart_on_stop_iteration:
        next(iterator, None)  # at its end, where the nodes count their epoch
        start = states_of(generators)
        iterator = iter(loader)
    read = state_reader(loader, iterator)

    def read_both(ended: bool) -> Any:
        source = read(ended)
        if isinstance(source, Exception):
            return source
        return {**source, _BESIDE: {"generators": start, "ended": ended}}

    return drop_first(iterator, skip), read_both


def _nodes(root: Any) -> list[Any]:
    """The nodes of a graph, from its root."""
    kind = sys.modules["torchdata.nodes"].BaseNode
    found = [root]
    for node in found:
        for held in vars(node).values():
            inside = held.values() if isinstance(held, Mapping) else held if isinstance(held, list | tuple) else (held,)
            found += [each for each in inside if isinstance(each, kind) and not any(each is other for other in found)]
    return found


def _parts_of(source: Any) -> list[Any]:
    """The states of the stream in a state of torchdata's: of each worker, or of this process."""
    return list(source.get("_snapshot", {}).get("_worker_snapshots", {}).values()) or [source]


def _has_none(source: Any) -> bool:
    """Whether a state of torchdata's holds none of the stream's."""
    return all(
        part["dataset_state"] is None and part["fetcher_state"]["dataset_iter_state"] is None for part in _parts_of(source)
    )


def _without_streams(source: Any) -> Any:
    """A state of torchdata's without the states of the stream, which then begins at its first sample."""
    found = copy.deepcopy({name: each for name, each in source.items() if name != _BESIDE})
    for part in _parts_of(found):
        part["dataset_state"] = None
    return found


def _until_first(iterator: Any, read: StateReader) -> StateReader:
    """As ``read``, but before its first batch the stream has no state: Hugging Face's have that of an earlier epoch."""

    def read_begun(ended: bool) -> Any:
        return read(ended) if iterator._num_yielded or ended else _without_streams(read(ended))

    return read_begun


def _is_hugging_faces(dataset: Any) -> bool:
    return any(kind.__module__ == "datasets.iterable_dataset" for kind in type(dataset).__mro__)


def _shuffles_in_memory(dataset: Any) -> bool:
    """Whether a stream of Hugging Face's holds a buffer that is shuffled, which is not in its state."""
    found = [dataset._ex_iterable]
    for each in found:
        if type(each).__name__ == "BufferShuffledExamplesIterable":
            return True
        inner = getattr(each, "ex_iterable", None)
        found += [*([] if inner is None else [inner]), *(getattr(each, "ex_iterables", None) or ())]
    return False


def _begin_anew(loader: Any) -> None:
    """Have a stream of Hugging Face's begin its next epoch at its first sample."""
    if not loader.num_workers:
        loader.dataset.load_state_dict({})
    elif has_persistent_workers(loader):  # they hold copies of the stream
        iterator = loader._iterator
        loader._iterator = None
        end_workers(iterator)
