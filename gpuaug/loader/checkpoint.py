"""``Progress``: the position of the training loop (epoch and batch), and a loader's ``state_dict`` for checkpoints.

The position advances when a batch is *handed over*: returned by ``next``. A *prepared* loader was returned by Hugging Face
Accelerate's ``accelerator.prepare``.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from gpuaug.core import rng
from gpuaug.core.errors import ArgumentError, ArgumentTypeError, flag, shown, warn, whole_number
from gpuaug.feed.draws_ahead import read_open_to_end
from gpuaug.feed.feed import Feed
from gpuaug.feed.prepared_loader import PreparedLoader, ReadState
from gpuaug.feed.wrapped_loader import (
    FIRST_BATCH,
    START_WITH_NEW_WORKERS,
    Start,
    epoch_of,
    has_persistent_workers,
    set_epoch_of,
)
from gpuaug.loader.agreement import batches_done, description, differences
from gpuaug.loader.device_setup import DeviceSetup
from gpuaug.loader.replaced import Replaced, replaced_of

_WAY_OUT = "Pass what state_dict() of a StreamedLoader returned."
"""Advice in errors about an argument that is no state."""

MAX_SEED = 2**64 - 1
"""Largest seed: it is packed into 64 bits of the random-number key."""

MAX_COUNT = 2**63 - 1
"""Largest rank, batch index and epoch that a user may pass."""

VERSION = 2
"""Version of the state's format. Increased when an older release cannot read the state, or would produce other batches."""

_RELEASE_OF_VERSION = {1: "0.2.0"}
"""Older version of the format → newest release of gpuaug that reads it."""


class SavedState(NamedTuple):
    """Position of the training loop, with the state of the wrapped loader. The fields are keys of the saved state."""

    epoch: int
    batch: int
    """Number of batches of the epoch that were handed over."""
    ended: bool
    """Whether ``next`` has raised ``StopIteration``. Still false when it has returned the last batch."""
    chosen: bool
    """Whether the epoch was set with ``set_epoch``, not counted."""
    source: Any
    """State of the wrapped loader, or the error that reading it raised; ``None`` if the state cannot be read."""


class _Next(NamedTuple):
    """Position at which the next iterator begins."""

    epoch: int | None = None
    """Epoch that was set or loaded; ``None``: the epoch after the epoch of the last iterator."""
    chosen: bool = False
    """Whether ``epoch`` was set with ``set_epoch``."""
    first_batch: int = 0
    """Index of the first batch, according to a loaded state."""
    skipped: int = 0
    """Number of further batches to skip, set with ``skip``."""
    start: Start = FIRST_BATCH
    """Start of the epoch of the wrapped loader, according to a loaded state."""

    @property
    def batch(self) -> int:
        """Index of the first batch that the iterator returns."""
        return self.first_batch + self.skipped


class Progress:
    """Counter of epochs and batches, with the wrapped loader's state after the batch that was handed over last.

    Args:
        loader: The wrapped loader.
        device_setup: Stages of the loader, on their device.
        seed: The user's seed, or ``None``.
        feed: Source of the loader's batches.
        end_iterations: Function that ends all open iterations over the wrapped loader.
        prepared: Access to the wrapped loader if Accelerate has prepared it; else ``None``.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device_setup: DeviceSetup,
        seed: int | None,
        feed: Feed,
        end_iterations: Callable[[], None],
        prepared: PreparedLoader | None = None,
    ) -> None:
        self._device_setup = device_setup
        self.seed = rng.default_seed() if seed is None else seed
        """Seed of the stages' random numbers."""
        self._seed_is_set = seed is not None
        self._loader = loader
        self._feed = feed
        self._source = feed.source
        self._end_iterations = end_iterations
        self._prepared = prepared
        self._saved: SavedState | None = None
        """Position after the batch that was handed over last; ``None`` before the first iterator."""
        self._epoch = -1
        """Epoch of the last iterator; -1 before the first."""
        self._next = _Next()
        self.replaced = Replaced()
        """Samples that were replaced."""

    def set_seed(self, seed: int) -> None:
        """Set the seed, which a loaded state then does not change."""
        self.seed = seed
        self._seed_is_set = True

    @property
    def position_state(self) -> dict[str, Any]:
        """Position of the training loop and of the next iterator. Assign the mapping to restore both."""
        return {name: vars(self)[name] for name in ("seed", "_seed_is_set", "_saved", "_epoch", "_next", "replaced")}

    @position_state.setter
    def position_state(self, value: Mapping[str, Any]) -> None:
        vars(self).update(value)

    @property
    def position_state_of_copy(self) -> dict[str, Any]:
        """``position_state`` for a copy of the loader, which starts new workers in place of running persistent workers.

        The seed of the copy's workers is not drawn from the loader's generators, because no seed is drawn for running workers.
        """
        read_open_to_end(self._source.variables)  # as the next iterator of this loader would do
        next_iterator = self._next
        if next_iterator.start == FIRST_BATCH and has_persistent_workers(self._loader) and self._feed.has_running_workers:
            next_iterator = next_iterator._replace(start=START_WITH_NEW_WORKERS)
        return {**self.position_state, "_next": next_iterator}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iterator."""
        is_other_epoch = epoch != self.next_epoch
        if self._next.start.state is not None and is_other_epoch and self._source.discard(self._feed.loader):
            self._next = self._next._replace(first_batch=0, start=FIRST_BATCH)  # the saved position belongs to another epoch
        self._next = self._next._replace(epoch=epoch, chosen=True)
        set_epoch_of(self._loader, epoch)

    def skip(self, batches: int) -> None:
        """Skip the first ``batches`` batches of the next iterator."""
        self._next = self._next._replace(skipped=batches)

    def start(self, rank: int) -> Start:
        """Start of the wrapped loader's next epoch, for ``Feed.open``."""
        start = self._next.start
        seed = start.worker_seed
        if seed is not None:
            seed = rng.Position(self.seed, self.next_epoch, rank, self._next.batch).key("workers")
        return start._replace(batches=start.batches + self._next.skipped, worker_seed=seed)

    def prepare(self) -> None:
        """Set the epoch of the next iterator if Accelerate has prepared the wrapped loader. Call before the iterator begins."""
        if self._prepared is None:
            return
        loaded = self._prepared.loaded_position()
        if loaded is not None and self._next.epoch in (None, loaded["epoch"]):
            self._next = self._next._replace(epoch=loaded["epoch"], first_batch=loaded["batch"])
            self.seed = self.seed if self._seed_is_set else loaded["seed"]
        self._prepared.prepare(self.next_epoch)
        skipped_by_sampler, skipped_by_loader = self._prepared.skipped
        self._next = self._next._replace(
            first_batch=max(self._next.first_batch, skipped_by_sampler), skipped=max(self._next.skipped, skipped_by_loader)
        )

    def begin(self, source: Any) -> SavedState:
        """Begin an iterator with ``source`` as the wrapped loader's state, and return the iterator's first position.

        If ``source`` is ``None``, the state before the first batch is the loaded state, or the state at the end of the last
        epoch. If the last epoch was left early, the position stays at its last batch until a batch is handed over.
        """
        self._epoch = self.next_epoch
        last = self._saved
        continues_last = self._next.start.state is not None
        start = SavedState(self._epoch, self._next.batch, False, self._next.chosen, source)
        self._next = _Next()
        if self._prepared is not None:
            self._prepared.begin()
        self.set_position(start)
        if last is not None and self._saved is not None and self._saved.source is None:
            self._saved = self._saved._replace(source=last.source) if last.ended or continues_last else last
        return start

    @contextmanager
    def restored_at_end(self) -> Iterator[None]:
        """Context manager that restores the position of the training loop at its end.

        If the wrapped loader has ``state_dict``, the loader's state is restored too. A loader that is not a ``DataLoader`` may
        store the state in itself instead of its iterator. In that case open iterators end.
        """
        loader: Any = self._feed.loader
        source = None if self._source.begins_anywhere else self._next.start.state  # None: the loader has nothing to restore
        if self._source.stores_position:
            self._end_iterations()
            source = self.state_dict()["source"] if self._saved is not None else None
            source = copy.deepcopy(loader.state_dict()) if source is None else source
        restored_prepared = nullcontext() if self._prepared is None else self._prepared.restored_at_end()
        position_state = self.position_state
        try:
            with restored_prepared:
                yield
        finally:
            if source is not None:
                loader.load_state_dict(copy.deepcopy(source))
            self.position_state = position_state
            if self._next.chosen and self._next.epoch is not None:
                set_epoch_of(self._loader, self._next.epoch)

    def set_position(self, position: SavedState) -> None:
        """Set the position of the training loop. Called by the iterator that was read last."""
        if self._prepared is not None:
            read_state: ReadState = position.source  # what ``Feed`` reads from a prepared loader
            ended = position.ended or read_state.is_last
            next_position = {"seed": self.seed, "epoch": position.epoch + ended, "batch": 0 if ended else position.batch}
            self._prepared.hand_over(read_state, next_position)
            if position.ended:
                self._prepared.end(position.epoch)
            position = position._replace(source=read_state.state)
        self._saved = position

    def record_close(self) -> None:
        """Record that an iterator was closed, at the end of the epoch or earlier."""
        if self._prepared is not None:
            self._prepared.leave()

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the batch that was handed over last.

        The state holds

        - the state of the wrapped loader after that batch, or for a ``DataLoader`` of a map-style dataset the states of its
          generators at the beginning of the epoch;
        - the seed, the epoch and the number of batches, on which the random numbers of stages depend;
        - the number of ranks, the stages and their decoders, which ``load_state_dict`` compares with the current run;
        - the samples that a ``DecodeStage`` has replaced.

        Save the state on each rank. It consists of plain values and tensors, a few kilobytes, and
        ``torch.load(weights_only=True)`` reads it.

        Raises:
            Exception: The error that the wrapped loader raised when its state was read.
        """
        position = self._saved
        if position is None:
            source = self._source.state_before_first(self._feed.loader)
            position = SavedState(self.next_epoch, 0, False, self._next.chosen, source)
        if isinstance(position.source, Exception):
            raise position.source
        return {
            "version": VERSION,
            "seed": self.seed,
            **copy.deepcopy(position._asdict()),
            **description(self._device_setup.stage_pairs, self._source),
            **({"replaced": copy.deepcopy(self.replaced._asdict())} if self.replaced.samples else {}),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Resume from a state: the next iterator begins with the first batch that the saved run had not handed over.

        Stages draw the same random numbers as in an uninterrupted run. If the loader was created without ``seed``, the seed of
        the state is used. Open iterators end. A ``FeatureStage`` runs the first batch of each shape without a CUDA graph, as in
        every iterator.

        Args:
            state_dict: A result of ``state_dict``, of this or an earlier run.
            strict: Whether to raise if the seed, the number of ranks, the stages, the decoders or the settings of the
                ``DataLoader`` differ from the state. ``False``: each difference causes a warning, and later batches differ from
                an uninterrupted run. With another batch size, or another number of ranks among which a ``DistributedSampler``
                divides the dataset, the epoch of a plain ``DataLoader`` continues after the samples that were processed, the
                epoch of a ``StatefulDataLoader`` after the same number of batches, or at the state of its stream.

        Raises:
            ArgumentError, ArgumentTypeError: If ``state_dict`` is not a state, if it is from before the first batch and cannot
                set the wrapped loader back, or, with ``strict``, if it differs from this run. The loader is unchanged.
            GpuAugError: If a custom sampler returns another order than in the epoch that has ended. Open iterators have ended.
            Exception: Any error of the wrapped loader's ``load_state_dict``, or of its sampler. Open iterators have ended.

        Warns:
            GpuAugWarning: For each difference, if ``strict`` is false.
        """
        strict = flag("strict", strict, "Leave it out to raise an error for each difference.")
        state = _checked_state(state_dict)
        replaced = replaced_of(state, _WAY_OUT)
        saved = SavedState(*(state[name] for name in SavedState._fields))
        restarts = self._checked_restart(saved)
        source = self._source
        # torchdata's state tells whether the epoch has ended. Under Accelerate, which reads ahead, it has after the last batch.
        ended = saved.ended or (isinstance(saved.source, Mapping) and bool(saved.source.get("_iterator_finished", False)))
        seed = self.seed if self._seed_is_set else state["seed"]
        current = {"seed": seed, **description(self._device_setup.stage_pairs, source, state.get("decoders", ()))}
        index_state = source.index_state(saved.source)
        state["settings"] = {} if index_state is None else index_state["settings"]
        current["settings"] = {} if index_state is None else source.settings()
        if source.begins_anywhere and not ended:  # the epoch can continue at any batch
            saved = saved._replace(batch=min(batches_done(state, current, sharded=source.ranks is not None), MAX_COUNT))
        for name, saved_value, current_value, way_out in differences(state, current):
            if strict:
                raise ArgumentError(
                    f"{name} must be {saved_value}, as in the state, got {current_value}. {way_out} "
                    "To resume with different batches, pass strict=False to load_state_dict."
                )
            warn(
                f"Batches from {0 if ended else saved.batch} on differ from an uninterrupted run, because "
                f"{name[0].lower()}{name[1:]} was {saved_value} in the state and is {current_value}. {way_out}"
            )
        self._end_iterations()  # no thread may read the loader while its state changes
        saved = saved._replace(source=copy.deepcopy(saved.source))
        if saved.chosen and not ended:
            set_epoch_of(self._loader, saved.epoch)
        if restarts:
            self._feed.end_persistent_workers()  # new workers draw their seeds from the generators, as in the first epoch
            source.restart(self._feed.loader, saved.source)
            start = FIRST_BATCH
        else:
            start = source.load(self._feed.loader, saved.source, Start(saved.batch, same_order=strict), ended=ended)
        self.seed = seed
        self.replaced = replaced
        self._saved = saved
        self._epoch = saved.epoch
        self._next = _Next(start=start) if ended else _Next(saved.epoch, saved.chosen, saved.batch, start=start)

    def _checked_restart(self, saved: SavedState) -> bool:
        """Check that a state fits the wrapped loader. Return whether it is from before the first batch: the run begins anew."""
        restarts = not saved.ended and not saved.batch
        if not restarts or saved.source is not None:
            self._source.check(self._feed.loader, saved.source)
        restarts = restarts and self._source.is_before_first(saved.source)
        has_been_read = self._saved is not None and not self._source.is_before_first(self._saved.source)
        if restarts and has_been_read and not self._source.can_restart(self._feed.loader):
            name = type(self._loader).__name__
            raise ArgumentError(
                f"The state cannot be loaded, because it is from before the first batch, and the {name} has been read. "
                f"Load the state into a StreamedLoader around a new {name}."
            )
        return restarts

    @property
    def next_epoch(self) -> int:
        """Epoch of the next iterator."""
        if self._next.epoch is not None:
            return self._next.epoch
        return max(self._epoch + 1, epoch_of(self._loader) if self._prepared is None else self._prepared.epoch)


def _checked_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state after checking the types of its entries.

    Raises:
        ArgumentError, ArgumentTypeError: If ``state`` is not a state of a ``StreamedLoader``.
    """
    if not isinstance(state, Mapping):
        raise ArgumentTypeError(f"state must be a mapping, got {type(state).__name__}. {_WAY_OUT}")
    version = whole_number("state['version']", state.get("version", VERSION), _WAY_OUT, least=1)
    if version != VERSION:
        way_out = "A newer release of gpuaug saved this state. Install that release."
        if version in _RELEASE_OF_VERSION:
            way_out = f'Resume with the release that saved it: pip install "gpuaug=={_RELEASE_OF_VERSION[version]}".'
        raise ArgumentError(f"state['version'] must be {VERSION}, got {version}. {way_out}")
    names = ("version", "seed", *SavedState._fields, "ranks", "stages")
    if missing := [name for name in names if name not in state]:
        raise ArgumentError(f"state must have the keys {', '.join(names)}, got no {', '.join(missing)}. {_WAY_OUT}")
    limits = {"seed": MAX_SEED, "epoch": MAX_SEED, "batch": MAX_COUNT, "ranks": MAX_COUNT}
    numbers = {name: whole_number(f"state[{name!r}]", state[name], _WAY_OUT, most=limit) for name, limit in limits.items()}
    flags = {name: flag(f"state[{name!r}]", state[name], _WAY_OUT) for name in ("ended", "chosen")}
    for name in ("stages", "decoders"):
        entries = state.get(name, {})
        if not isinstance(entries, Mapping) or not all(isinstance(text, str) for pair in entries.items() for text in pair):
            raise ArgumentTypeError(f"state[{name!r}] must be a mapping of names to text, got {shown(entries)}. {_WAY_OUT}")
    return {**state, **numbers, **flags}
