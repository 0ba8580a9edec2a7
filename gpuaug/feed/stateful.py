"""Exact resumption of torchdata's ``StatefulDataLoader`` and of torchdata's graphs of nodes.

An *additional state* (``extra_state``) is saved with torchdata's state, which is not sufficient in three cases:

- torchdata saves how many indices a sampler has yielded, and on resumption reads this number of indices again. Without a state
  of the sampler, they differ from the indices of the interrupted epoch. So the additional state has the states of generators at
  the beginning of the epoch.
- For a *stream* (an iterable dataset) without a state, torchdata reads batches again, and counts these batches twice. So the
  state at the beginning of the epoch is saved, with the number of batches to drop.
- After a state was loaded into a stream of Hugging Face, all later epochs begin at this state. So the stream is reset.
"""

import copy
import inspect
import sys
from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset

from gpuaug.core.errors import ArgumentError, ArgumentTypeError
from gpuaug.feed.draws_ahead import DrawsAhead, set_states, states_of
from gpuaug.feed.resumable import IndexedSource, Source, generators_of, is_by_index, is_index_state
from gpuaug.feed.wrapped_loader import (
    START_WITH_NEW_WORKERS,
    IteratorAndReader,
    Start,
    StateReader,
    dataset_of,
    drop_first,
    end_workers,
    has_persistent_workers,
    has_state_methods,
    parts,
    state_reader,
    uses_iteration_of,
)

_EXTRA_KEY = "gpuaug_order"
"""Key of the additional state in torchdata's state."""


class StatefulSource(IndexedSource):
    """Adapter of a ``StatefulDataLoader``, which begins epochs at a loaded state.

    Args:
        loader: The user's loader.
    """

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.has_state = True
        self.begins_anywhere = False
        self.ranks = None
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        dataset_types = type(dataset_of(loader)).__mro__
        self._is_of_hugging_face = any(cls.__module__ == "datasets.iterable_dataset" for cls in dataset_types)
        self._dataset_has_state = has_state_methods(loader.dataset)
        if self._dataset_has_state:
            _check_state_method(loader.dataset)
        self._records_order = (
            not self._is_stream and not has_state_methods(loader.batch_sampler) and not has_state_methods(loader.sampler)
        )
        """Whether the additional state has to describe the order of the samples."""
        self._resumed = False
        """Whether the newest epoch began from a state."""

    def accepts(self, state: Any) -> bool:
        """Return whether ``state`` is a state of torchdata, with a valid additional state or without an additional state."""
        extra_state = self.index_state(state)
        return not is_index_state(state) and (extra_state is None or super().accepts(extra_state))

    def check(self, loader: Any, state: Any) -> None:
        """Check that ``state`` is a state of this type of loader, with the same number of workers.

        Raises:
            ArgumentError: If the type or the number of workers differs.
        """
        super().check(loader, state)
        if not isinstance(state, Mapping) or not state or self.is_before_first(state):
            return
        main_snapshot = state.get("_snapshot", {}).get("_main_snapshot", {})
        workers = main_snapshot.get("_num_workers", 0) if isinstance(main_snapshot, Mapping) else 0
        if workers != loader.num_workers:
            raise ArgumentError(
                f"num_workers must be {workers}, as in the saved run, got {loader.num_workers}. "
                "A StatefulDataLoader resumes with the same number of workers only; a plain DataLoader with any number."
            )

    def index_state(self, state: Any) -> Mapping[str, Any] | None:
        """Return the additional state in ``state``; ``None`` without one."""
        return state.get(_EXTRA_KEY) if isinstance(state, Mapping) else None

    def state_before_first(self, loader: Any) -> Any:
        """Return the state before the first batch of the first epoch, without torchdata's state.

        Reading torchdata's state would start workers.
        """
        return {_EXTRA_KEY: self.state()}

    def is_before_first(self, state: Any) -> bool:
        """Return whether ``state`` is from before the first batch: a result of ``state_before_first``, or ``None``."""
        return state is None or (isinstance(state, Mapping) and set(state) == {_EXTRA_KEY})

    def can_restart(self, loader: Any) -> bool:
        """Return whether ``restart`` suffices after batches were read: no object in this process stores a position."""
        is_read_here = not loader.num_workers and not self._is_of_hugging_face
        return not (is_read_here and self._dataset_has_state) and not self.has_custom_sampler_with_state

    def restart(self, loader: Any, state: Any) -> None:
        """Let the next epoch begin at its first batch, with the generators and epochs of samplers in ``state``."""
        self.discard(loader)
        super().restart(loader, self.index_state(state))

    def load(self, loader: Any, state: Any, start: Start, *, ended: bool) -> Start:
        """Load a state, and set the epochs of samplers and of the stream."""
        if (extra_state := self.index_state(state)) is not None:
            self.epochs = extra_state["epochs"]
        start = Source.load(self, loader, state, start, ended=ended)
        # In an uninterrupted run, persistent workers get no new seed from the loader's generator.
        needs_seed = ended and has_persistent_workers(loader)
        return start._replace(worker_seed=START_WITH_NEW_WORKERS.worker_seed) if needs_seed else start

    def discard(self, loader: Any) -> bool:
        """Discard the state that was loaded into the loader, so that the next epoch begins at its first batch."""
        loader.next_iter_state = None
        return True

    def begin(self, loader: Any, start: Start) -> IteratorAndReader:
        """Begin an epoch. Call on the thread that may draw from torch's global generator.

        Args:
            loader: The user's loader.
            start: Start of the epoch. The loaded state is read from the loader: Accelerate may have loaded it.

        Raises:
            ArgumentError: If persistent workers cannot load the state of the dataset.
            GpuAugError: If the order of the sampler differs from the order of the resumed epoch.
        """
        iterator: Any
        self.draws_ahead = DrawsAhead()
        if self._resumed and self._is_of_hugging_face:
            _reset_stream(loader)
        state: Any = loader.next_iter_state
        extra_state = self.index_state(state)
        worker_seed = start.worker_seed
        if extra_state is not None and state["_iterator_finished"]:  # the state is from the end of an epoch
            persistent = has_persistent_workers(loader)
            # Only torchdata can load the state of a dataset in persistent workers, or of a stream.
            if self._dataset_has_state and (persistent or self._is_stream) and not self._is_of_hugging_face:
                if persistent:
                    raise ArgumentError(
                        "persistent_workers must be False to go on from the end of an epoch if the dataset has a state, got "
                        "True: torchdata's persistent workers read samples while they load the state. Leave "
                        "persistent_workers out in the StatefulDataLoader."
                    )
            else:  # the next epoch begins at its first batch, from the restored values at the end of the last epoch
                if not self._is_stream and state.get("dataset_state") is not None:
                    loader.dataset.load_state_dict(state["dataset_state"])
                self.restore_end(extra_state, same_order=start.same_order)
                if persistent and worker_seed is None:  # the state was not loaded by ``load``, but by Accelerate
                    worker_seed = START_WITH_NEW_WORKERS.worker_seed
                state = extra_state = loader.next_iter_state = None
        self._resumed = state is not None
        # ``IndexedSource`` reads the sampler, except to resume a state that was saved without gpuaug (which has no additional
        # state), or if torchdata has created the iterator already, to return its state.
        if self._records_order and (state is None) is (extra_state is None) and not loader._initial_iter_for_state_dict:
            worker_seed = 0 if state is not None else worker_seed  # with workers, torchdata loads their seed
            iterator, read_order = super().begin(loader, Start(0, worker_seed, extra_state, start.same_order))
            self.draws_ahead.items_before_first += start.batches
            return drop_first(iterator, start.batches), _with_extra(_reader(loader, iterator), read_order)
        iterator = iter(loader)
        if extra_state is not None:
            set_states(self.generators, extra_state["generators"])
        additional_state = self.state()  # at the beginning of the epoch
        read = _reader(loader, iterator)

        # ``read``, ``read_start`` and ``read_new_stream`` read torchdata's state. One of them is returned, with ``read_extra``.

        def read_start(ended: bool | None) -> Any:
            """State at the beginning of the epoch, for a stream that is read again; at the end, the state of the end."""
            additional_state["batches"] = max(num_dropped, iterator._num_yielded)
            return read(True) if ended else state_at_start

        def read_new_stream(ended: bool | None) -> Any:
            """State of a stream of Hugging Face, which before the first batch returns the state of an earlier epoch."""
            return read(ended) if iterator._num_yielded or ended else _without_streams(read(ended))

        def read_extra(ended: bool | None) -> Any:
            """Additional state: of the beginning of this epoch; at its end, of the beginning of the next."""
            return self.state() if ended else dict(additional_state)

        # A loaded state with the key "batches" is from an epoch that is read again.
        begins_at_start = state is None or (extra_state is not None and "batches" in extra_state)
        must_reread = self._is_of_hugging_face and _shuffles_in_memory(dataset_of(loader))
        if self._is_stream and begins_at_start and (must_reread or _has_no_stream_state(read(False))):
            # The state of an epoch that is read again is the state at its beginning, and the number of batches to drop, which
            # ``read_start`` writes to ``additional_state``.
            num_dropped = 0 if extra_state is None else extra_state["batches"]
            state_at_start = _without_streams(read(False) if state is None else state)
            return drop_first(iterator, num_dropped + start.batches), _with_extra(read_start, read_extra)
        is_new_stream = self._is_of_hugging_face and state is None  # not resumed
        return drop_first(iterator, start.batches), _with_extra(read_new_stream if is_new_stream else read, read_extra)


def _reader(loader: Any, iterator: Any) -> StateReader:
    """Return the ``StateReader`` of a ``StatefulDataLoader``, which also reads the state before the first batch."""
    read = state_reader(loader, iterator)
    return lambda ended: read(bool(ended))


def _with_extra(read: StateReader, read_extra: StateReader) -> StateReader:
    """Return a function that reads torchdata's state, with the additional state in it."""

    def read_both(ended: bool | None) -> Any:
        state = read(ended)
        return {**state, _EXTRA_KEY: read_extra(ended)} if isinstance(state, Mapping) else state

    return read_both


class GraphSource(Source):
    """Adapter of a graph of torchdata's nodes.

    On resumption, torchdata reads the number of indices again that the samplers had yielded. Before this, the generators of
    samplers are restored. Torch's global generator, from which a sampler without a generator draws, is not restored.
    """

    def begin(self, loader: Any, start: Start) -> IteratorAndReader:
        """Begin an epoch at the state that was loaded into the loader."""
        samplers = [node.sampler for node in _nodes(loader.root) if hasattr(node, "sampler")]
        paths = {f"{number}.{path}": part for number, sampler in enumerate(samplers) for path, part in parts(sampler).items()}
        generators = generators_of(paths)
        extra_state = (loader._next_iter_state_dict or {}).get(_EXTRA_KEY, {})
        set_states(generators, extra_state.get("generators", {}))
        states = states_of(generators)
        iterator = iter(loader)
        if extra_state.get("ended") and not loader.restart_on_stop_iteration:
            next(iterator, None)  # reaches the end of the resumed epoch, so that the nodes increase their epoch
            states = states_of(generators)
            iterator = iter(loader)
        read = _with_extra(state_reader(loader, iterator), lambda ended: {"generators": states, "ended": ended})
        return drop_first(iterator, start.batches), read


def source_of(loader: Any) -> Source:
    """Return the adapter of a wrapped loader."""
    if any(cls.__module__ == "torchdata.nodes.loader" for cls in type(loader).__mro__):
        return GraphSource(loader)
    if keeps_state(loader):
        return StatefulSource(loader)
    return IndexedSource(loader) if is_by_index(loader) else Source(loader)


def keeps_state(loader: Any) -> bool:
    """Return whether ``loader`` is torchdata's ``StatefulDataLoader``, which stores its iterator and state in itself."""
    cls = getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", None)
    return cls is not None and isinstance(loader, cls) and uses_iteration_of(loader, cls)


def sends_states(loader: Any) -> bool:
    """Return whether workers of ``loader`` send states: whether it is a ``StatefulDataLoader``, also of a subclass."""
    return hasattr(loader, "next_iter_state")


def _check_state_method(dataset: Any) -> None:
    """Check that torchdata can call ``dataset.state_dict()``.

    Raises:
        ArgumentTypeError: If ``state_dict`` has required arguments, which only a loader of the dataset's package passes.
    """
    try:
        inspect.signature(dataset.state_dict).bind()
    except TypeError as error:
        raise ArgumentTypeError(
            f"The dataset of a StatefulDataLoader must have a state_dict() without required arguments, got "
            f"{type(dataset).__name__}: {error}. Use the loader of its package, such as its StreamingDataLoader."
        ) from None
    except ValueError:  # a function in C, without a signature
        return


def _nodes(root: Any) -> list[Any]:
    """Return the nodes of a graph, the root first."""
    node_type = sys.modules["torchdata.nodes"].BaseNode
    nodes = [root]
    for node in nodes:  # grows in the loop
        for value in vars(node).values():
            members = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else (value,)
            nodes += [item for item in members if isinstance(item, node_type) and not any(item is known for known in nodes)]
    return nodes


def _stream_states(state: Any) -> list[Any]:
    """Return the parts of torchdata's ``state`` with states of the stream: one part per worker; ``[state]`` without workers."""
    return list(state.get("_snapshot", {}).get("_worker_snapshots", {}).values()) or [state]


def _has_no_stream_state(state: Any) -> bool:
    """Return whether a torchdata state holds no state of the stream.

    Raises:
        Exception: ``state`` if it is the error that reading the state raised.
    """
    if isinstance(state, Exception):
        raise state
    return all(
        part["dataset_state"] is None and part["fetcher_state"]["dataset_iter_state"] is None for part in _stream_states(state)
    )


def _without_streams(state: Any) -> Any:
    """Return a copy of torchdata's ``state`` without the state of the stream, which then begins at its first sample."""
    state_copy = copy.deepcopy({name: value for name, value in state.items() if name != _EXTRA_KEY})
    for part in _stream_states(state_copy):
        part["dataset_state"] = None
    return state_copy


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
