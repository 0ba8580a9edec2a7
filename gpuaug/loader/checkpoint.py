"""The position of the training loop, and its state for checkpoints."""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from gpuaug.core import rng
from gpuaug.core.errors import ArgumentError, ArgumentTypeError, GpuAugWarning, flag, shown, whole_number
from gpuaug.feed.feed import Feed
from gpuaug.feed.prepared_loader import Place, PreparedLoader
from gpuaug.feed.resumable import Resume
from gpuaug.feed.wrapped_loader import is_stateful, tell_epoch, told_epoch
from gpuaug.loader.agreement import WAY_OUT, batches_had, check_source, description, differences
from gpuaug.loader.placement import Placement

MOST_SEED = 2**64 - 1
"""Largest seed: draws are keyed by words of 64 bits."""

MOST_COUNT = 2**63 - 1
"""Largest rank, batch, and epoch that is set."""

VERSION = 2
"""Version of the state. Raised when an older gpuaug could not read it, or decodes or draws otherwise."""

_READ_BY = {1: "0.2.0"}
"""Release that reads states of each older version."""


class Snapshot(NamedTuple):
    """Position of the training loop."""

    epoch: int
    batch: int
    """Batches of the epoch that were handed over."""
    ended: bool
    """Whether the epoch's end was reached, not only its last batch."""
    chosen: bool
    """Whether ``set_epoch`` chose the epoch."""
    source: Any
    """The wrapped loader's state, or the error of reading it; ``None`` before the first batch of all."""


class Progress:
    """Counts epochs and batches, and keeps the wrapped loader's state as it was at the batch that was handed over last.

    Args:
        loader: The wrapped loader.
        placement: Its stages.
        seed: The user's seed for draws, or ``None``.
        feed: Begins passes over the loader.
        end_passes: Ends the passes over the loader that are open.
        prepared: The loader as one of Accelerate's, if it is.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        placement: Placement,
        seed: int | None,
        feed: Feed,
        end_passes: Callable[[], None],
        prepared: PreparedLoader | None = None,
    ) -> None:
        self._placement = placement
        self._seed = rng.default_seed() if seed is None else seed
        self._seed_given = seed is not None
        self._loader = loader
        self._resumable = feed.resumable
        self._stateful = feed.stateful
        self._end_passes = end_passes
        self._prepared = prepared
        self._epoch = -1
        self._next: int | None = None
        """Epoch of the next iterator, or ``None`` for the following one."""
        self._chosen = False
        self._first = 0
        self._skip = 0
        self._snapshot: Snapshot | None = None
        self._given: Any = None
        """State that the wrapped loader was given, until an iterator begins from it."""
        self._resume: Resume | None = None
        """Where the next iterator begins, if not at the first batch."""

    @property
    def seed(self) -> int:
        """Seed of the draws of stages."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = seed
        self._seed_given = True

    @property
    def place(self) -> tuple[Any, ...]:
        """Where the training loop is, and where the next iterator begins. Assign it to go on from there."""
        begins = self._epoch, self._next, self._chosen, self._first, self._skip, self._given, self._resume
        return self._seed, self._seed_given, self._snapshot, *begins

    @place.setter
    def place(self, place: tuple[Any, ...]) -> None:
        self._seed, self._seed_given, self._snapshot, *begins = place
        self._epoch, self._next, self._chosen, self._first, self._skip, self._given, self._resume = begins

    @property
    def can_resume(self) -> bool:
        """Whether the wrapped loader can go on from a batch."""
        return self._resumable is not None or is_stateful(self._loader)

    def choose(self, epoch: int) -> None:
        """Make ``epoch`` that of the next iterator."""
        if self._resumable is not None and epoch != self._following:
            self._first = 0
            self._resume = None  # the saved position belongs to another epoch
        if self._stateful is not None and self._given is not None and epoch != self._following:
            self._first = 0
            self._given = None
            self._stateful.forget(self._loader if self._prepared is None else self._prepared.dataloader)
        self._next = epoch
        self._chosen = True
        tell_epoch(self._loader, epoch)

    def skip(self, batches: int) -> None:
        """Have the next iterator leave out its first ``batches``."""
        self._skip = batches

    def resume(self, rank: int) -> Resume | None:
        """Where the next iterator begins, if not at the first batch of its epoch."""
        if self._resume is None:
            return Resume(self._skip, None, None, False) if self._skip else None
        at = rng.Position(self._seed, self._following, rank, self._first + self._skip)
        return self._resume._replace(batches=self._resume.batches + self._skip, seed=at.key("workers"))

    def prepare(self) -> None:
        """Tell a loader of Accelerate's the epoch of the iterator that is about to begin."""
        if self._prepared is None:
            return
        place = self._prepared.loaded()
        if place is not None and self._next in (None, place.epoch):
            self._next = place.epoch
            self._first = place.batch
            self._seed = self._seed if self._seed_given else place.seed
        self._prepared.prepare(self._following)
        in_sampler, by_loader = self._prepared.skipped
        self._first = max(self._first, in_sampler)
        self._skip = max(self._skip, by_loader)

    def begin(self, source: Any) -> Snapshot:
        """Begin an iterator with ``source`` as the wrapped loader's state. Returns its position."""
        self._epoch = self._following
        begun = Snapshot(self._epoch, self._first + self._skip, False, self._chosen, source)
        self._next = None
        self._chosen = False
        self._first = 0
        self._skip = 0
        self._given = None
        self._resume = None
        if self._prepared is not None:
            self._prepared.begin()
        self.reach(begun)
        return begun

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """A block whose iterators do not count: afterwards the training loop is where it was before.

        A wrapped loader that has a state gets it back, others begin their next pass as they would have. Where the loader is
        no ``DataLoader``, its state may be in itself, and iterators that are open end.
        """
        source = self._given
        # A DataLoader's place is each iterator's own: the next one begins anew, unless it was given a state to begin from.
        if is_stateful(self._loader) and not isinstance(getattr(self._loader, "base_dataloader", self._loader), DataLoader):
            self._end_passes()
            source = self.state_dict()["source"] if self._snapshot is not None else None
            source = copy.deepcopy(self._loader.state_dict()) if source is None else source  # type: ignore[attr-defined]
        prepared = nullcontext() if self._prepared is None else self._prepared.set_aside()
        place = self.place
        try:
            with prepared:
                yield
        finally:
            if source is not None:
                self._loader.load_state_dict(copy.deepcopy(source))  # type: ignore[attr-defined]
            self.place = place
            if self._chosen and self._next is not None:
                tell_epoch(self._loader, self._next)

    def reach(self, reached: Snapshot) -> None:
        """Set the position to that of the iterator that was read last."""
        if self._prepared is not None:
            ended = reached.ended or reached.source.last
            place = Place(self._seed, reached.epoch + ended, 0 if ended else reached.batch)
            self._prepared.hand_over(reached.source, place)
            if reached.ended:
                self._prepared.end(reached.epoch)
            reached = reached._replace(source=reached.source.state)
        self._snapshot = reached

    def leave(self) -> None:
        """Note that an iterator was closed, at its end or before."""
        if self._prepared is not None:
            self._prepared.leave()

    def state_dict(self) -> dict[str, Any]:
        """State after the batch that was handed over last. Batches that were loaded ahead do not count.

        Holds the wrapped loader's own state after that batch, or the states of a ``DataLoader``'s generators as the epoch
        began; what the draws of stages depend on: the seed, the epoch and the number of batches; and, to be compared, the
        number of ranks, the stages and their decoders. Each rank has its own. Made of plain values and tensors, some
        kilobytes, which ``torch.load(weights_only=True)`` reads.

        Raises:
            Exception: What the wrapped loader raised when it was asked for its state.
        """
        reached = self._snapshot or Snapshot(self._following, 0, False, self._chosen, None)
        if isinstance(reached.source, Exception):
            raise reached.source
        return {
            "version": VERSION,
            "seed": self._seed,
            **copy.deepcopy(reached._asdict()),
            **description(self._placement.pairs, self._resumable),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on from a state of ``state_dict``: the next iterator begins with the batch after it.

        Stages draw what they would have drawn. The seed is that of the state, unless one was given that differs. Iterators that
        are open end. A ``FeatureStage`` runs the first batch of each shape without a graph, as in every iterator.

        Args:
            state_dict: What ``state_dict`` returned, here or in an earlier run.
            strict: ``False`` takes a state of another number of ranks, another seed, other stages, decoders or settings of the
                ``DataLoader``, and warns of each. Batches are then not what they would have been. If a ``DistributedSampler``
                divides the dataset among another number of ranks, or in other batches, the epoch goes on after the samples that
                were had.

        Raises:
            ArgumentError, ArgumentTypeError: If it is no such state, or one that differs. Then nothing has changed.
            Exception: What the wrapped loader raises about its own part. Iterators that were open have ended then.

        Warns:
            GpuAugWarning: If ``strict`` is false, of each difference.
        """
        state = _checked(state_dict)
        reached = Snapshot(*(state[name] for name in Snapshot._fields))
        strict = flag("strict", strict, "Leave it out to have differences refused.")
        resumable = self._resumable
        source = reached.source
        batch = reached.batch
        check_source(source, batch, self._loader, resumable, self._stateful)
        seed = self._seed if self._seed_given else state["seed"]
        now = {"seed": seed, **description(self._placement.pairs, self._resumable, state.get("decoders", ()))}
        settings = resumable.settings() if resumable is not None and source is not None else {}
        found = list(differences(state, now, settings))
        if found and strict:
            name, then, here, way_out = found[0]
            raise ArgumentError(
                f"{name} must be {then}, as in the state, got {here}. {way_out} "
                "To go on with other batches, pass strict=False to load_state_dict."
            )
        ended = reached.ended or _is_finished(source)
        if settings and not ended:
            sharded = resumable is not None and resumable.ranks is not None
            batch = min(batches_had(state, now, settings, sharded=sharded), MOST_COUNT)
        at = 0 if ended else batch
        for name, then, here, way_out in found:
            warnings.warn(
                f"Batches from {at} on are not those of an uninterrupted run, because {name[0].lower()}{name[1:]} "
                f"was {then} in the state and is {here}. {way_out}",
                GpuAugWarning,
                stacklevel=2,
            )
        self._end_passes()  # a thread that reads the loader must not see its state change
        if reached.chosen and not ended:
            tell_epoch(self._loader, reached.epoch)
        source = copy.deepcopy(source)
        self._resume = None
        self._given = None
        if resumable is None:
            if source is not None:
                self._loader.load_state_dict(copy.deepcopy(source))  # type: ignore[attr-defined]
            if self._stateful is not None:
                self._stateful.put_back(source, same_order=strict)
            self._given = source
        elif source is not None:
            resumable.put_back(source, ended=ended)
            if not ended:
                self._resume = Resume(batch, 0, source, strict)
            elif getattr(self._loader, "persistent_workers", False):
                self._resume = Resume(0, 0, None, False)  # their seeds were drawn in an earlier epoch
        self._seed = seed
        self._epoch = reached.epoch
        self._next = None if ended else reached.epoch
        self._chosen = False if ended else reached.chosen
        self._first = at
        self._skip = 0
        self._snapshot = reached._replace(batch=batch, source=source)

    @property
    def _following(self) -> int:
        if self._next is not None:
            return self._next
        return max(self._epoch + 1, told_epoch(self._loader) if self._prepared is None else self._prepared.epoch)


def _checked(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state whose entries are of the types that they must have.

    Raises:
        ArgumentError, ArgumentTypeError: If it is no state.
    """
    if not isinstance(state, Mapping):
        raise ArgumentTypeError(f"state must be a mapping, got {type(state).__name__}. {WAY_OUT}")
    version = whole_number("state['version']", state.get("version", VERSION), WAY_OUT, least=1)
    if version != VERSION:
        way_out = "It is of a newer gpuaug: install that."
        if version in _READ_BY:
            way_out = f'Go on with the release that made it: pip install "gpuaug=={_READ_BY[version]}".'
        raise ArgumentError(f"state['version'] must be {VERSION}, got {version}. {way_out}")
    names = ("version", "seed", *Snapshot._fields, "ranks", "stages")
    if missing := [name for name in names if name not in state]:
        raise ArgumentError(f"state must hold {', '.join(names)}, got one without {', '.join(missing)}. {WAY_OUT}")
    most = {"seed": MOST_SEED, "epoch": MOST_SEED, "batch": MOST_COUNT, "ranks": MOST_COUNT}
    numbers = {name: whole_number(f"state[{name!r}]", state[name], WAY_OUT, most=at_most) for name, at_most in most.items()}
    flags = {name: flag(f"state[{name!r}]", state[name], WAY_OUT) for name in ("ended", "chosen")}
    for name in ("stages", "decoders"):
        entries = state.get(name, {})
        if not isinstance(entries, Mapping) or not all(isinstance(each, str) for pair in entries.items() for each in pair):
            raise ArgumentTypeError(f"state[{name!r}] must be a mapping of names to text, got {shown(entries)}. {WAY_OUT}")
    return {**state, **numbers, **flags}


def _is_finished(source: Any) -> bool:
    """Whether torchdata's loader would start over. Under Accelerate, which reads one batch ahead, it would after its last."""
    return isinstance(source, Mapping) and bool(source.get("_iterator_finished", False))
