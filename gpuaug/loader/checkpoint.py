"""``Progress``: the position of the training loop (epoch and batch), and a loader's ``state_dict`` for checkpoints.

The position advances when a batch is *handed over*: returned by ``next``. A *prepared* loader was returned by Hugging Face
Accelerate's ``accelerator.prepare``.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from gpuaug.core import rng
from gpuaug.core.errors import ArgumentError, ArgumentTypeError, GpuAugWarning, flag, shown, whole_number
from gpuaug.feed.draws_ahead import states_of
from gpuaug.feed.feed import Feed
from gpuaug.feed.prepared_loader import PreparedLoader, ReadState, RunPosition
from gpuaug.feed.resumable import Resume, is_state
from gpuaug.feed.stateful import is_before_first, is_graph
from gpuaug.feed.wrapped_loader import epoch_of, has_persistent_workers, is_stateful, set_epoch_of
from gpuaug.loader.agreement import WAY_OUT, batches_done, check_source, description, differences
from gpuaug.loader.device_setup import DeviceSetup

MAX_SEED = 2**64 - 1
"""Largest seed: it is packed into 64 bits of the random-number key."""

MAX_COUNT = 2**63 - 1
"""Largest rank, batch index and epoch that a user may pass."""

VERSION = 2
"""Version of the state's format. Increased when an older release cannot read the state, or would produce other batches."""

_RELEASE_OF_VERSION = {1: "0.2.0"}
"""Older version of the format → newest release of gpuaug that reads it."""


class Snapshot(NamedTuple):
    """Position of the training loop, with the state of the wrapped loader. The fields are keys of the saved state."""

    epoch: int
    batch: int
    """Number of batches of the epoch that were handed over."""
    ended: bool
    """Whether ``next`` has raised ``StopIteration``. False after the last batch alone."""
    chosen: bool
    """Whether the epoch was set with ``set_epoch``, not counted."""
    source: Any
    """State of the wrapped loader, or the error that reading it raised; ``None`` if the state cannot be read."""


_POSITION_ATTRIBUTES = (
    *("_seed", "_seed_is_set", "_snapshot"),
    *("_epoch", "_fixed_epoch", "_chosen", "_first_batch", "_skip", "_loaded_source", "_resume"),
)
"""Attributes of ``Progress`` that hold the position of the training loop and of the next iterator."""


_NEW_WORKERS = Resume(0, 0, None, False)
"""Position at the beginning of an epoch before which persistent workers, which have drawn their seed, were running."""


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
        self._seed = rng.default_seed() if seed is None else seed
        self._seed_is_set = seed is not None
        self._loader = loader
        self._feed = feed
        self._resumable = feed.resumable
        self._stateful = feed.stateful
        self._end_iterations = end_iterations
        self._prepared = prepared
        self._epoch = -1
        self._fixed_epoch: int | None = None
        """Epoch of the next iterator if it was set or loaded; ``None``: one after ``_epoch``."""
        self._chosen = False
        """Whether ``_fixed_epoch`` was set with ``set_epoch``."""
        self._first_batch = 0
        """Index of the first batch of the next iterator, according to a loaded state."""
        self._skip = 0
        """Number of further batches that the next iterator skips, set with ``skip``."""
        self._snapshot: Snapshot | None = None
        self._loaded_source: Any = None
        """State that was loaded into the wrapped loader, until an iterator begins from it."""
        self._resume: Resume | None = None
        """Position at which the next iterator begins; ``None``: the first batch."""

    @property
    def seed(self) -> int:
        """Seed of the stages' random numbers."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = seed
        self._seed_is_set = True

    @property
    def position_state(self) -> tuple[Any, ...]:
        """Position of the training loop and of the next iterator, as an opaque tuple. Assign the tuple to restore both."""
        return tuple(getattr(self, name) for name in _POSITION_ATTRIBUTES)

    @position_state.setter
    def position_state(self, value: tuple[Any, ...]) -> None:
        for name, entry in zip(_POSITION_ATTRIBUTES, value, strict=True):
            setattr(self, name, entry)

    @property
    def position_state_of_copy(self) -> tuple[Any, ...]:
        """``position_state`` for a copy of the loader, whose persistent workers start anew if this loader's are running.

        The copy's workers get a seed without drawing it from the loader's generators, as running workers draw none.
        """
        resume = self._resume
        if resume is None and has_persistent_workers(self._loader) and self._feed.has_running_workers:
            resume = _NEW_WORKERS
        return (*self.position_state[:-1], resume)

    @property
    def can_resume(self) -> bool:
        """Whether an iteration over the wrapped loader can begin at any batch."""
        return self._resumable is not None or is_stateful(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iterator."""
        if self._resumable is not None and epoch != self._next_epoch:
            self._first_batch = 0
            self._resume = None  # the saved position belongs to another epoch
        if self._stateful is not None and self._loaded_source is not None and epoch != self._next_epoch:
            self._first_batch = 0
            self._loaded_source = None
            self._stateful.discard_loaded_state(self._base_loader)
        self._fixed_epoch = epoch
        self._chosen = True
        set_epoch_of(self._loader, epoch)

    def skip(self, batches: int) -> None:
        """Skip the first ``batches`` batches of the next iterator."""
        self._skip = batches

    def resume(self, rank: int) -> Resume | None:
        """Position at which the next iterator begins, for ``Feed.open``; ``None``: the first batch."""
        if self._resume is None:
            return Resume(self._skip, None, None, False) if self._skip else None
        position = rng.Position(self._seed, self._next_epoch, rank, self._first_batch + self._skip)
        return self._resume._replace(batches=self._resume.batches + self._skip, seed=position.key("workers"))

    def prepare(self) -> None:
        """Set the epoch of the next iterator if Accelerate has prepared the wrapped loader. Call before the iterator begins."""
        if self._prepared is None:
            return
        loaded = self._prepared.loaded_position()
        if loaded is not None and self._fixed_epoch in (None, loaded.epoch):
            self._fixed_epoch = loaded.epoch
            self._first_batch = loaded.batch
            self._seed = self._seed if self._seed_is_set else loaded.seed
        self._prepared.prepare(self._next_epoch)
        skipped_by_sampler, skipped_by_loader = self._prepared.skipped
        self._first_batch = max(self._first_batch, skipped_by_sampler)
        self._skip = max(self._skip, skipped_by_loader)

    def begin(self, source: Any) -> Snapshot:
        """Begin an iterator with ``source`` as the wrapped loader's state, and return the iterator's first position."""
        self._epoch = self._next_epoch
        start = Snapshot(self._epoch, self._first_batch + self._skip, False, self._chosen, source)
        self._fixed_epoch = None
        self._chosen = False
        self._first_batch = 0
        self._skip = 0
        self._loaded_source = None
        self._resume = None
        if self._prepared is not None:
            self._prepared.begin()
        self.set_position(start)
        return start

    @contextmanager
    def restored_at_end(self) -> Iterator[None]:
        """Context manager that restores the position of the training loop at its end.

        If the wrapped loader has ``state_dict``, the loader's state is restored too. A loader that is not a ``DataLoader`` may
        store the state in itself instead of its iterator. In that case open iterators end.
        """
        source = self._loaded_source
        if is_stateful(self._loader) and not self._is_dataloader:
            self._end_iterations()
            source = self.state_dict()["source"] if self._snapshot is not None else None
            source = copy.deepcopy(self._loader.state_dict()) if source is None else source  # type: ignore[attr-defined]
        restored_prepared = nullcontext() if self._prepared is None else self._prepared.restored_at_end()
        position_state = self.position_state
        try:
            with restored_prepared:
                yield
        finally:
            if source is not None:
                self._loader.load_state_dict(copy.deepcopy(source))  # type: ignore[attr-defined]
            self.position_state = position_state
            if self._chosen and self._fixed_epoch is not None:
                set_epoch_of(self._loader, self._fixed_epoch)

    def set_position(self, position: Snapshot) -> None:
        """Set the position of the training loop. Called by the iterator that was read last."""
        if self._prepared is not None:
            read_state: ReadState = position.source
            ended = position.ended or read_state.is_last
            next_position = RunPosition(self._seed, position.epoch + ended, 0 if ended else position.batch)
            self._prepared.hand_over(read_state, next_position)
            if position.ended:
                self._prepared.end(position.epoch)
            position = position._replace(source=read_state.state)
        self._snapshot = position

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
        - the number of ranks, the stages and their decoders, which ``load_state_dict`` compares with the current run.

        Save the state on each rank. It consists of plain values and tensors, a few kilobytes, and
        ``torch.load(weights_only=True)`` reads it.

        Raises:
            Exception: The error that the wrapped loader raised when its state was read.
        """
        position = self._snapshot or Snapshot(self._next_epoch, 0, False, self._chosen, self._source_before_first())
        if isinstance(position.source, Exception):
            raise position.source
        return {
            "version": VERSION,
            "seed": self._seed,
            **copy.deepcopy(position._asdict()),
            **description(self._device_setup.stage_pairs, self._resumable),
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
        state = _checked_state(state_dict)
        saved_position = Snapshot(*(state[name] for name in Snapshot._fields))
        strict = flag("strict", strict, "Leave it out to raise an error for each difference.")
        resumable = self._resumable
        source = saved_position.source
        batch = saved_position.batch
        check_source(source, batch, self._loader, resumable, self._stateful)
        before_first = not saved_position.ended and not batch and _is_before_first(source)
        if before_first and not self._can_restart:
            name = type(self._loader).__name__
            raise ArgumentError(
                f"The state cannot be loaded, because it is from before the first batch, and the {name} is past it. "
                f"Load the state into a StreamedLoader around a new {name}."
            )
        seed = self._seed if self._seed_is_set else state["seed"]
        current = {"seed": seed, **description(self._device_setup.stage_pairs, self._resumable, state.get("decoders", ()))}
        state["settings"], current["settings"] = self._loader_settings(source)
        all_differences = list(differences(state, current))
        if all_differences and strict:
            name, saved_value, current_value, way_out = all_differences[0]
            raise ArgumentError(
                f"{name} must be {saved_value}, as in the state, got {current_value}. {way_out} "
                "To resume with different batches, pass strict=False to load_state_dict."
            )
        ended = saved_position.ended or _is_finished(source)
        if resumable is not None and not ended:
            batch = min(batches_done(state, current, sharded=resumable.ranks is not None), MAX_COUNT)
        first_batch = 0 if ended else batch
        for name, saved_value, current_value, way_out in all_differences:
            warnings.warn(
                f"Batches from {first_batch} on differ from an uninterrupted run, because {name[0].lower()}{name[1:]} "
                f"was {saved_value} in the state and is {current_value}. {way_out}",
                GpuAugWarning,
                stacklevel=2,
            )
        self._end_iterations()  # no thread may read the loader while its state changes
        if saved_position.chosen and not ended:
            set_epoch_of(self._loader, saved_position.epoch)
        source = copy.deepcopy(source)
        self._resume = None
        self._loaded_source = None
        if before_first:
            self._restart(source)
        elif resumable is None:
            if source is not None:
                self._loader.load_state_dict(copy.deepcopy(source))  # type: ignore[attr-defined]
            if self._stateful is not None:
                self._stateful.restore(source, same_order=strict)
            self._loaded_source = source
        elif source is not None:
            resumable.epochs = source["epochs"]
            if ended:
                with rng.generator_lock:  # the sampler may draw from torch's global generator
                    resumable.restore_end(source, same_order=strict)
            else:
                self._resume = Resume(batch, 0, source, strict)
            if ended and getattr(self._loader, "persistent_workers", False):
                self._resume = _NEW_WORKERS
        self._seed = seed
        self._epoch = saved_position.epoch
        self._fixed_epoch = None if ended else saved_position.epoch
        self._chosen = False if ended else saved_position.chosen
        self._first_batch = first_batch
        self._skip = 0
        self._snapshot = saved_position._replace(batch=batch, source=source)

    @property
    def _is_dataloader(self) -> bool:
        """Whether the wrapped loader is a ``DataLoader``, also if Accelerate has prepared it.

        A ``DataLoader`` stores its position in its iterators: the next iterator begins at the first batch or at a loaded state.
        """
        return isinstance(getattr(self._loader, "base_dataloader", self._loader), DataLoader)

    def _source_before_first(self) -> Any:
        """Return the state of the wrapped loader before the first batch of the first epoch; ``None`` if it cannot be read."""
        if self._resumable is not None:
            return self._resumable.state(states_of(self._resumable.generators))
        if self._stateful is not None:
            return self._stateful.state_before_first()
        if self._is_dataloader or is_graph(self._loader):
            return None  # reading the state would begin an iteration
        return self._loader.state_dict()  # type: ignore[attr-defined]

    @property
    def _can_restart(self) -> bool:
        """Whether ``_restart`` suffices to begin at the first batch of the first epoch."""
        if self._resumable is not None or self._snapshot is None or is_before_first(self._snapshot.source):
            return True
        return self._stateful is not None and self._stateful.can_restart(self._base_loader)

    def _restart(self, source: Any) -> None:
        """Let the next iterator begin as the first one did, with ``source`` as the wrapped loader's state before it."""
        self._feed.end_persistent_workers()  # new workers draw their seeds from the generators, as in the first epoch
        if self._stateful is not None:
            self._stateful.restart(self._base_loader, source)
        elif source is not None and self._resumable is not None:
            self._resumable.restart(source)

    @property
    def _base_loader(self) -> Any:
        """The wrapped loader; the ``DataLoader`` that it wraps if Accelerate has prepared it."""
        return self._loader if self._prepared is None else self._prepared.dataloader

    def _loader_settings(self, source: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return the settings of the wrapped loader, such as its batch size: (in its state, current); both empty if unknown."""
        if self._stateful is not None:
            return self._stateful.settings(source)
        return ({}, {}) if self._resumable is None or source is None else (source["settings"], self._resumable.settings())

    @property
    def _next_epoch(self) -> int:
        if self._fixed_epoch is not None:
            return self._fixed_epoch
        return max(self._epoch + 1, epoch_of(self._loader) if self._prepared is None else self._prepared.epoch)


def _checked_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state after checking the types of its entries.

    Raises:
        ArgumentError, ArgumentTypeError: If ``state`` is not a state of a ``StreamedLoader``.
    """
    if not isinstance(state, Mapping):
        raise ArgumentTypeError(f"state must be a mapping, got {type(state).__name__}. {WAY_OUT}")
    version = whole_number("state['version']", state.get("version", VERSION), WAY_OUT, least=1)
    if version != VERSION:
        way_out = "A newer release of gpuaug saved this state. Install that release."
        if version in _RELEASE_OF_VERSION:
            way_out = f'Resume with the release that saved it: pip install "gpuaug=={_RELEASE_OF_VERSION[version]}".'
        raise ArgumentError(f"state['version'] must be {VERSION}, got {version}. {way_out}")
    names = ("version", "seed", *Snapshot._fields, "ranks", "stages")
    if missing := [name for name in names if name not in state]:
        raise ArgumentError(f"state must have the keys {', '.join(names)}, got no {', '.join(missing)}. {WAY_OUT}")
    limits = {"seed": MAX_SEED, "epoch": MAX_SEED, "batch": MAX_COUNT, "ranks": MAX_COUNT}
    numbers = {name: whole_number(f"state[{name!r}]", state[name], WAY_OUT, most=limit) for name, limit in limits.items()}
    flags = {name: flag(f"state[{name!r}]", state[name], WAY_OUT) for name in ("ended", "chosen")}
    for name in ("stages", "decoders"):
        entries = state.get(name, {})
        if not isinstance(entries, Mapping) or not all(isinstance(text, str) for pair in entries.items() for text in pair):
            raise ArgumentTypeError(f"state[{name!r}] must be a mapping of names to text, got {shown(entries)}. {WAY_OUT}")
    return {**state, **numbers, **flags}


def _is_before_first(source: Any) -> bool:
    """Whether the state ``source`` of the wrapped loader is from before the first batch of the first epoch."""
    return is_before_first(source) or (is_state(source) and "order" not in source)


def _is_finished(source: Any) -> bool:
    """Whether the state ``source`` of torchdata's loader is from the end of an epoch.

    Under Accelerate, which reads one batch ahead, the result is true after the last batch, before the end of the epoch.
    """
    return isinstance(source, Mapping) and bool(source.get("_iterator_finished", False))
