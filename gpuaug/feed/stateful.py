"""Exact resumption of torchdata's ``StatefulDataLoader`` and graphs of nodes, in addition to the state that torchdata saves.

- torchdata saves how many indices a sampler has yielded, and on resuming reads as many again. These are the indices of the
  interrupted epoch only if the sampler has a state. So the states of generators at the beginning of the epoch are saved beside
  torchdata's state, and restored.
- For a stream (iterable dataset) without a state, torchdata counts batches twice after it has read them again. So the state
  saved here is that of the beginning of the epoch, with the number of batches to drop.
- A stream of Hugging Face into which a state was loaded begins all later epochs at that state. It is reset before them.
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
    IteratorAndReader,
    StateReader,
    drop_first,
    end_workers,
    has_persistent_workers,
    has_state,
    state_reader,
)

_EXTRA_KEY = "gpuaug_order"
"""Key in torchdata's state of the additional state."""


class StatefulLoader:
    """State of a ``StatefulDataLoader``, and the beginning of its epochs.

    Args:
        loader: The user's loader.
    """

    def __init__(self, loader: Any) -> None:
        self._parts = ResumableLoader(loader)
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._records_order = not self._is_stream and not has_state(loader.batch_sampler) and not has_state(loader.sampler)
        self._same_order = True
        self._resumed = False
        """Whether the last epoch began from a state."""

    def accepts(self, source: Any) -> bool:
        """Whether ``begin`` accepts the state ``source`` after it was loaded into the loader."""
        return not isinstance(source, Mapping) or _EXTRA_KEY not in source or self._parts.accepts(source[_EXTRA_KEY])

    def restore(self, source: Any, *, same_order: bool) -> None:
        """Set the epochs of samplers and of the stream to those of a state that was loaded into the loader.

        Args:
            source: The state.
            same_order: Whether to raise if the order differs from that of the resumed epoch.
        """
        self._same_order = same_order
        if isinstance(source, Mapping) and _EXTRA_KEY in source:
            self._parts.epochs = source[_EXTRA_KEY]["epochs"]

    @staticmethod
    def forget(loader: Any) -> None:
        """Let the next epoch begin at its first batch although a state was loaded into the loader."""
        loader.next_iter_state = None

    def begin(self, loader: Any, skip: int) -> IteratorAndReader:
        """Begin an epoch. Call on the thread that may draw from torch's global generator.

        Args:
            loader: The user's loader.
            skip: Number of batches to skip, after those that the loaded state skips.

        Raises:
            ArgumentError: If persistent workers cannot load the state of the dataset.
            GpuAugError: If the order of the sampler differs from that of the resumed epoch.
        """
        if self._resumed and _is_hugging_faces(loader.dataset):
            _begin_anew(loader)
        loaded: Any = loader.next_iter_state
        beside: Any = loaded.get(_EXTRA_KEY) if isinstance(loaded, Mapping) else None
        finished = beside is not None and loaded["_iterator_finished"]
        if finished and self._loads_ended(loader) and has_persistent_workers(loader):
            raise ArgumentError(
                "persistent_workers must be False to go on from the end of an epoch where the dataset has a state, got True: "
                "torchdata's persistent workers read on while they load it. Leave it out in the StatefulDataLoader."
            )
        if finished and not self._loads_ended(loader):
            if not self._is_stream and loaded.get("dataset_state") is not None:
                loader.dataset.load_state_dict(loaded["dataset_state"])
            self._set_generators_to_end(beside)
            loaded = beside = loader.next_iter_state = None
        self._resumed = loaded is not None
        if self._records_order and (loaded is None) is (beside is None) and not loader._initial_iter_for_state_dict:
            resume = None if beside is None else Resume(0, None, beside, self._same_order)
            if finished and has_persistent_workers(loader):
                resume = Resume(0, 0, None, False)  # the seeds of persistent workers were drawn in an earlier epoch
            iterator, indices = self._parts.begin_recorded(loader, resume)
            return drop_first(iterator, skip), self._reader(state_reader(loader, iterator), indices.state)
        iterator = iter(loader)
        if beside is not None:
            set_states(self._parts.generators, beside["generators"])
        state_at_start = self._state()
        read = state_reader(loader, iterator)
        counted = loaded is None or (beside is not None and "batches" in beside)
        if self._is_stream and counted and (self._is_reread(loader) or _has_no_stream_state(read(False))):
            return self._begin_reread(iterator, read, skip, loaded, state_at_start)
        if _is_hugging_faces(loader.dataset) and loaded is None:
            read = _without_stream_before_first(iterator, read)
        return drop_first(iterator, skip), self._reader(read, lambda ended: self._state() if ended else state_at_start)

    def _state(self) -> dict[str, Any]:
        return self._parts.state(states_of(self._parts.generators))

    def _reader(self, read: StateReader, beside: StateReader) -> StateReader:
        """Function that reads torchdata's state together with the additional state that ``beside`` reads."""

        def read_both(ended: bool) -> Any:
            source = read(ended)
            return source if isinstance(source, Exception) else {**source, _EXTRA_KEY: {**beside(ended), "ended": ended}}

        return read_both

    def _begin_reread(
        self, iterator: Any, read: StateReader, skip: int, loaded: Any, state_at_start: Mapping[str, Any]
    ) -> IteratorAndReader:
        """Begin an epoch of a stream that is read again from its beginning.

        Its state is the state at the beginning of the epoch, and the number of batches to drop.
        """
        source_at_start = _without_streams(read(False) if loaded is None else loaded)
        batches = 0 if loaded is None else loaded[_EXTRA_KEY]["batches"]

        def read_start(ended: bool) -> Any:
            source = read(True) if ended else source_at_start
            beside = self._state() if ended else state_at_start
            return {**source, _EXTRA_KEY: {**beside, "ended": ended, "batches": max(batches, iterator._num_yielded)}}

        return drop_first(iterator, batches + skip), read_start

    def _set_generators_to_end(self, beside: Mapping[str, Any]) -> None:
        """Set generators to their states at the end of the epoch that ``beside`` describes."""
        generators = self._parts.generators
        global_state = torch.get_rng_state()
        set_states(generators, beside["generators"])
        # A checkpoint of Accelerate is of the last batch, not of the end of the epoch, so the order is drawn once more.
        # Accelerate has set the epoch already.
        if self._records_order and not beside["ended"]:
            epochs = self._parts.epochs
            deque(self._parts.sampler, maxlen=0)
            self._parts.epochs = epochs
            set_states(generators, beside.get("begun", {}))
            torch.set_rng_state(global_state)

    def _loads_ended(self, loader: Any) -> bool:
        """Whether torchdata loads the state that the dataset had at the end of an epoch into the dataset."""
        if self._is_stream:
            return has_state(loader.dataset) and not _is_hugging_faces(loader.dataset)
        return has_state(loader.dataset) and has_persistent_workers(loader)

    @staticmethod
    def _is_reread(loader: Any) -> bool:
        return _is_hugging_faces(loader.dataset) and _shuffles_in_memory(loader.dataset)


def is_graph(loader: Any) -> bool:
    """Whether ``loader`` is a ``torchdata.nodes.Loader``."""
    return any(cls.__module__ == "torchdata.nodes.loader" for cls in type(loader).__mro__)


def begin_graph(loader: Any, skip: int) -> IteratorAndReader:
    """Begin an epoch of a graph of torchdata's nodes.

    On resuming, torchdata reads as many indices from the samplers as they had yielded. The generators of samplers are restored
    for that. A sampler without a generator draws from torch's global one, on the pulling thread, and is not restored.

    Args:
        loader: The user's ``Loader``.
        skip: Number of batches to skip, after those that the loaded state skips.
    """
    samplers = [node.sampler for node in _nodes(loader.root) if hasattr(node, "sampler")]
    generators = {
        f"{number}{depth}": generator
        for number, sampler in enumerate(samplers)
        for depth, owner in (("", sampler), (".sampler", getattr(sampler, "sampler", None)))
        if isinstance(generator := getattr(owner, "generator", None), torch.Generator)
    }
    loaded = loader._next_iter_state_dict
    beside = loaded.get(_EXTRA_KEY, {}) if isinstance(loaded, Mapping) else {}
    set_states(generators, beside.get("generators", {}))
    start = states_of(generators)
    iterator = iter(loader)
    if beside.get("ended") and not loader.restart_on_stop_iteration:
        next(iterator, None)  # raises StopIteration inside, at which the nodes increase their epoch
        start = states_of(generators)
        iterator = iter(loader)
    read = state_reader(loader, iterator)

    def read_both(ended: bool) -> Any:
        source = read(ended)
        if isinstance(source, Exception):
            return source
        return {**source, _EXTRA_KEY: {"generators": start, "ended": ended}}

    return drop_first(iterator, skip), read_both


def _nodes(root: Any) -> list[Any]:
    """Nodes of a graph, the root first."""
    node_type = sys.modules["torchdata.nodes"].BaseNode
    nodes = [root]
    for node in nodes:
        for value in vars(node).values():
            members = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else (value,)
            nodes += [item for item in members if isinstance(item, node_type) and not any(item is other for other in nodes)]
    return nodes


def _stream_states(source: Any) -> list[Any]:
    """Parts of a torchdata state that hold the state of the stream: one per worker, or ``source`` itself without workers."""
    return list(source.get("_snapshot", {}).get("_worker_snapshots", {}).values()) or [source]


def _has_no_stream_state(source: Any) -> bool:
    """Whether a torchdata state holds no state of the stream."""
    return all(
        part["dataset_state"] is None and part["fetcher_state"]["dataset_iter_state"] is None for part in _stream_states(source)
    )


def _without_streams(source: Any) -> Any:
    """Copy of a torchdata state without the state of the stream, which then begins at its first sample."""
    state = copy.deepcopy({name: value for name, value in source.items() if name != _EXTRA_KEY})
    for part in _stream_states(state):
        part["dataset_state"] = None
    return state


def _without_stream_before_first(iterator: Any, read: StateReader) -> StateReader:
    """``read``, but without the state of the stream before the first batch: Hugging Face's is that of an earlier epoch then."""

    def read_begun(ended: bool) -> Any:
        return read(ended) if iterator._num_yielded or ended else _without_streams(read(ended))

    return read_begun


def _is_hugging_faces(dataset: Any) -> bool:
    return any(cls.__module__ == "datasets.iterable_dataset" for cls in type(dataset).__mro__)


def _shuffles_in_memory(dataset: Any) -> bool:
    """Whether a stream of Hugging Face shuffles a buffer, which its state does not contain."""
    iterables = [dataset._ex_iterable]
    for iterable in iterables:
        if type(iterable).__name__ == "BufferShuffledExamplesIterable":
            return True
        inner = getattr(iterable, "ex_iterable", None)
        iterables += [*([] if inner is None else [inner]), *(getattr(iterable, "ex_iterables", None) or ())]
    return False


def _begin_anew(loader: Any) -> None:
    """Let a stream of Hugging Face begin its next epoch at its first sample."""
    if not loader.num_workers:
        loader.dataset.load_state_dict({})
    elif has_persistent_workers(loader):  # persistent workers hold copies of the stream
        iterator = loader._iterator
        loader._iterator = None
        end_workers(iterator)
