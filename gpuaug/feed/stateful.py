"""Exact resumption of torchdata's ``StatefulDataLoader`` and of torchdata's graphs of nodes.

An *additional state* (``extra_state``) is saved with torchdata's state, which is not sufficient in three cases:

- torchdata saves how many indices a sampler has yielded, and on resumption reads this number of indices again. Without a state
  of the sampler, these are other indices than in the interrupted epoch. So the additional state has the states of generators at
  the beginning of the epoch.
- For a *stream* (an iterable dataset) without a state, torchdata reads batches again, and counts them twice. So the state at
  the beginning of the epoch is saved, with the number of batches to drop.
- After a state was loaded into a stream of Hugging Face, all later epochs begin at this state. So the stream is reset.
"""

import copy
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset

from gpuaug.core.errors import ArgumentError
from gpuaug.feed.draws_ahead import DrawsAhead, set_states, states_of
from gpuaug.feed.resumable import ResumableLoader, Resume
from gpuaug.feed.wrapped_loader import (
    IteratorAndReader,
    StateReader,
    begin_iterator,
    drop_first,
    end_workers,
    has_persistent_workers,
    has_state_methods,
    parts,
    state_reader,
)

_EXTRA_KEY = "gpuaug_order"
"""Key of the additional state in torchdata's state."""


class StatefulLoader:
    """Reader of a ``StatefulDataLoader``'s state, which can begin the loader's epochs at a loaded state.

    Args:
        loader: The user's loader.
    """

    def __init__(self, loader: Any) -> None:
        self._resumable = ResumableLoader(loader)
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._records_order = (
            not self._is_stream and not has_state_methods(loader.batch_sampler) and not has_state_methods(loader.sampler)
        )
        """Whether the additional state has to describe the order of the samples."""
        self._same_order = True
        self._resumed = False
        """Whether the last epoch began from a state."""

    @property
    def draws_ahead(self) -> DrawsAhead | None:
        """Draws of the sampler in the epoch that was begun last; ``None`` if they are not known."""
        return self._resumable.draws_ahead

    def accepts(self, state: Any) -> bool:
        """Return whether ``begin`` can use ``state`` after it was loaded into the loader."""
        return not isinstance(state, Mapping) or _EXTRA_KEY not in state or self._resumable.accepts(state[_EXTRA_KEY])

    def settings(self, state: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return the settings (in ``state``, of the loader), on which the batches of an epoch depend; both empty if unknown."""
        if isinstance(state, Mapping) and _EXTRA_KEY in state:
            return state[_EXTRA_KEY]["settings"], self._resumable.settings()
        return {}, {}

    def restore(self, state: Any, *, same_order: bool) -> None:
        """Set the epochs of samplers and of the stream to the epochs in a state that was loaded into the loader.

        Args:
            state: State of the loader.
            same_order: Whether ``begin`` raises an error if the order of the samples differs from the resumed epoch.
        """
        self._same_order = same_order
        if isinstance(state, Mapping) and _EXTRA_KEY in state:
            self._resumable.epochs = state[_EXTRA_KEY]["epochs"]

    def state_before_first(self) -> dict[str, Any]:
        """Return the state before the first batch of the first epoch, without torchdata's state.

        Reading torchdata's state would start workers.
        """
        return {_EXTRA_KEY: {**self._state(), "ended": False}}

    def restart(self, loader: Any, state: Any) -> None:
        """Let the next epoch begin at its first batch.

        Args:
            loader: The user's loader.
            state: State before the first batch; ``None``: generators and epochs of samplers are not changed.
        """
        self.discard_loaded_state(loader)
        if state is not None:
            self._resumable.restart(state[_EXTRA_KEY])

    def can_restart(self, loader: Any) -> bool:
        """Return whether ``restart`` suffices after batches were read: no object in this process has a position of its own."""
        is_read_here = not loader.num_workers and not _is_hugging_face_stream(loader.dataset)
        return not (is_read_here and has_state_methods(loader.dataset)) and not self._resumable.has_custom_sampler_with_state

    @staticmethod
    def discard_loaded_state(loader: Any) -> None:
        """Discard the state that was loaded into the loader, so that the next epoch begins at its first batch."""
        loader.next_iter_state = None

    def begin(self, loader: Any, resume: Resume | None) -> IteratorAndReader:
        """Begin an epoch. Call on the thread that may draw from torch's global generator.

        Args:
            loader: The user's loader.
            resume: Number of batches to skip after the position of the loaded state, and the seed of new workers; or ``None``.

        Raises:
            ArgumentError: If persistent workers cannot load the state of the dataset.
            GpuAugError: If the order of the sampler differs from the order of the resumed epoch.
        """
        self._resumable.draws_ahead = None
        skip = 0 if resume is None else resume.batches
        seed = None if resume is None else resume.seed
        if self._resumed and _is_hugging_face_stream(loader.dataset):
            _reset_stream(loader)
        loaded_state: Any = loader.next_iter_state
        extra_state: Any = loaded_state.get(_EXTRA_KEY) if isinstance(loaded_state, Mapping) else None
        is_at_end = extra_state is not None and loaded_state["_iterator_finished"]
        if is_at_end and self._loads_state_at_end(loader) and has_persistent_workers(loader):
            raise ArgumentError(
                "persistent_workers must be False to go on from the end of an epoch if the dataset has a state, got True: "
                "torchdata's persistent workers read samples while they load the state. Leave persistent_workers out in the "
                "StatefulDataLoader."
            )
        if is_at_end and not self._loads_state_at_end(loader):
            if not self._is_stream and loaded_state.get("dataset_state") is not None:
                loader.dataset.load_state_dict(loaded_state["dataset_state"])
            self._resumable.restore_end(extra_state, same_order=self._same_order)
            if has_persistent_workers(loader):
                seed = 0  # the seeds of persistent workers were drawn in an earlier epoch
            loaded_state = extra_state = loader.next_iter_state = None
        self._resumed = loaded_state is not None
        has_matching_states = (loaded_state is None) is (extra_state is None)
        if self._records_order and has_matching_states and not loader._initial_iter_for_state_dict:
            start = None if extra_state is None else Resume(0, None, extra_state, self._same_order)
            if start is None and seed is not None:
                start = Resume(0, seed, None, False)
            iterator, read_order = self._resumable.begin_recorded(loader, start)
            if self.draws_ahead is not None:
                self.draws_ahead.items_before_first += skip
            return drop_first(iterator, skip), self._reader(state_reader(loader, iterator), read_order)
        iterator = begin_iterator(loader)
        if extra_state is not None:
            set_states(self._resumable.generators, extra_state["generators"])
        state_at_start = self._state()
        read_torchdata = state_reader(loader, iterator)
        # A loaded state with the key "batches" was saved by ``_begin_reread``.
        begins_at_start = loaded_state is None or (extra_state is not None and "batches" in extra_state)
        if self._is_stream and begins_at_start and (self._must_reread(loader) or _has_no_stream_state(read_torchdata(False))):
            return self._begin_reread(iterator, read_torchdata, skip, loaded_state, state_at_start)
        if _is_hugging_face_stream(loader.dataset) and loaded_state is None:
            read_torchdata = _without_stream_before_first(iterator, read_torchdata)

        def read_extra(ended: bool) -> dict[str, Any]:
            return self._state() if ended else state_at_start

        return drop_first(iterator, skip), self._reader(read_torchdata, read_extra)

    def _state(self) -> dict[str, Any]:
        """Return the current states of generators and epochs of samplers."""
        return self._resumable.state(states_of(self._resumable.generators))

    def _reader(self, read_torchdata: StateReader, read_extra: StateReader) -> StateReader:
        """Return a function that reads torchdata's state, with the additional state in it."""

        def read_both(ended: bool) -> Any:
            state = read_torchdata(ended)
            return state if isinstance(state, Exception) else {**state, _EXTRA_KEY: {**read_extra(ended), "ended": ended}}

        return read_both

    def _begin_reread(
        self, iterator: Any, read: StateReader, skip: int, loaded_state: Any, extra_state_at_start: Mapping[str, Any]
    ) -> IteratorAndReader:
        """Begin an epoch of a stream that is read again from its beginning.

        The state of such an epoch is the state at its beginning, and the number of batches to drop.

        Args:
            iterator: Iterator of the loader.
            read: Function that reads torchdata's state.
            skip: Number of batches to skip after the position of the loaded state.
            loaded_state: State that was loaded into the loader, or ``None``.
            extra_state_at_start: Additional state at the beginning of the epoch.
        """
        state_at_start = _without_streams(read(False) if loaded_state is None else loaded_state)
        batches = 0 if loaded_state is None else loaded_state[_EXTRA_KEY]["batches"]

        def read_start(ended: bool) -> Any:
            state = read(True) if ended else state_at_start
            extra_state = self._state() if ended else extra_state_at_start
            return {**state, _EXTRA_KEY: {**extra_state, "ended": ended, "batches": max(batches, iterator._num_yielded)}}

        return drop_first(iterator, batches + skip), read_start

    def _loads_state_at_end(self, loader: Any) -> bool:
        """Return whether torchdata loads the state at the end of an epoch into the dataset."""
        if self._is_stream:
            return has_state_methods(loader.dataset) and not _is_hugging_face_stream(loader.dataset)
        return has_state_methods(loader.dataset) and has_persistent_workers(loader)

    @staticmethod
    def _must_reread(loader: Any) -> bool:
        """Return whether the stream must be read again from its beginning, although it has a state."""
        return _is_hugging_face_stream(loader.dataset) and _shuffles_in_memory(loader.dataset)


def is_before_first(state: Any) -> bool:
    """Return whether ``state`` is from before the first batch: a result of ``state_before_first``, or ``None``."""
    return state is None or (isinstance(state, Mapping) and set(state) == {_EXTRA_KEY})


def is_graph(loader: Any) -> bool:
    """Return whether ``loader`` is a ``torchdata.nodes.Loader``."""
    return any(cls.__module__ == "torchdata.nodes.loader" for cls in type(loader).__mro__)


def begin_graph(loader: Any, skip: int) -> IteratorAndReader:
    """Begin an epoch of a graph of torchdata's nodes.

    On resumption, torchdata reads the number of indices again that the samplers had yielded. Before this, the generators of
    samplers are restored. Torch's global generator, from which a sampler without a generator draws, is not restored.

    Args:
        loader: The user's ``Loader``.
        skip: Number of batches to skip after the position of the loaded state.
    """
    samplers = [node.sampler for node in _nodes(loader.root) if hasattr(node, "sampler")]
    generators = {
        f"{number}.{path}": generator
        for number, sampler in enumerate(samplers)
        for path, part in parts(sampler).items()
        if isinstance(generator := getattr(part, "generator", None), torch.Generator)
    }
    loaded_state = loader._next_iter_state_dict
    extra_state = loaded_state.get(_EXTRA_KEY, {}) if isinstance(loaded_state, Mapping) else {}
    set_states(generators, extra_state.get("generators", {}))
    start = states_of(generators)
    iterator = iter(loader)
    if extra_state.get("ended") and not loader.restart_on_stop_iteration:
        next(iterator, None)  # reaches the end of the resumed epoch, so that the nodes increase their epoch
        start = states_of(generators)
        iterator = iter(loader)
    read = state_reader(loader, iterator)

    def read_both(ended: bool) -> Any:
        state = read(ended)
        if isinstance(state, Exception):
            return state
        return {**state, _EXTRA_KEY: {"generators": start, "ended": ended}}

    return drop_first(iterator, skip), read_both


def _nodes(root: Any) -> list[Any]:
    """Return the nodes of a graph, the root first."""
    node_type = sys.modules["torchdata.nodes"].BaseNode
    nodes = [root]
    for node in nodes:
        for value in vars(node).values():
            members = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else (value,)
            nodes += [item for item in members if isinstance(item, node_type) and not any(item is other for other in nodes)]
    return nodes


def _stream_states(state: Any) -> list[Any]:
    """Return the parts of torchdata's ``state`` with the state of the stream: one per worker; ``state`` without workers."""
    return list(state.get("_snapshot", {}).get("_worker_snapshots", {}).values()) or [state]


def _has_no_stream_state(state: Any) -> bool:
    """Return whether a torchdata state holds no state of the stream."""
    return all(
        part["dataset_state"] is None and part["fetcher_state"]["dataset_iter_state"] is None for part in _stream_states(state)
    )


def _without_streams(state: Any) -> Any:
    """Return a copy of torchdata's ``state`` without the state of the stream, which then begins at its first sample."""
    state_copy = copy.deepcopy({name: value for name, value in state.items() if name != _EXTRA_KEY})
    for part in _stream_states(state_copy):
        part["dataset_state"] = None
    return state_copy


def _without_stream_before_first(iterator: Any, read: StateReader) -> StateReader:
    """Return a function like ``read`` that omits the state of the stream before the first batch.

    Before the first batch, a stream of Hugging Face returns the state of an earlier epoch.
    """

    def read_begun(ended: bool) -> Any:
        return read(ended) if iterator._num_yielded or ended else _without_streams(read(ended))

    return read_begun


def _is_hugging_face_stream(dataset: Any) -> bool:
    """Return whether ``dataset`` is an ``IterableDataset`` of Hugging Face's ``datasets``."""
    return any(cls.__module__ == "datasets.iterable_dataset" for cls in type(dataset).__mro__)


def _shuffles_in_memory(dataset: Any) -> bool:
    """Return whether a stream of Hugging Face shuffles samples in a buffer, which its state does not contain."""
    iterables = [dataset._ex_iterable]
    for iterable in iterables:
        if type(iterable).__name__ == "BufferShuffledExamplesIterable":
            return True
        inner = getattr(iterable, "ex_iterable", None)
        iterables += [*([] if inner is None else [inner]), *(getattr(iterable, "ex_iterables", None) or ())]
    return False


def _reset_stream(loader: Any) -> None:
    """Let a stream of Hugging Face begin its next epoch at its first sample."""
    if not loader.num_workers:
        loader.dataset.load_state_dict({})
    elif has_persistent_workers(loader):  # persistent workers hold copies of the stream
        iterator = loader._iterator
        loader._iterator = None
        end_workers(iterator)
