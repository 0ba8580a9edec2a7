"""How far the training loop has come, in a form that a checkpoint can hold."""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from gpuaug.core.errors import ArgumentError, ArgumentTypeError, GpuAugWarning, flag, whole_number
from gpuaug.feed.wrapped_loader import is_stateful, tell_epoch

MOST_SEED, MOST_COUNT = 2**64 - 1, 2**63 - 1
"""The largest seed, and the largest epoch, rank and batch: draws are keyed by words of 64 bits."""

_WAY_OUT = "Pass what state_dict() of a StreamedLoader returned."


class Snapshot(NamedTuple):
    """Where the training loop is."""

    epoch: int
    batch: int
    """Batches of the epoch that were handed over."""
    ended: bool
    """Whether the epoch's end was reached, not only its last batch."""
    chosen: bool
    """Whether the epoch was set, and not counted."""
    source: Any
    """The wrapped loader's state, or what was raised when it was asked for; ``None`` before the first batch of all."""


class Progress:
    """Counts epochs and batches, and keeps the wrapped loader's state as it was at the batch that was handed over last.

    Args:
        loader: The wrapped loader.
        seed: What draws depend on besides.
        end_passes: Ends the passes over the loader that are open.
        versions: What decides the last bits of stages' results, by the stage's name.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        seed: int,
        end_passes: Callable[[], None],
        versions: Callable[[], dict[str, str]] = dict,
    ) -> None:
        self.seed = seed
        self._loader = loader
        self._end_passes = end_passes
        self._versions = versions
        self._epoch = -1
        self._next: int | None = None
        """The epoch of the next iterator, where it is not the one that follows."""
        self._chosen = False
        self._first = 0
        self._snapshot: Snapshot | None = None
        self._given: Any = None
        """The state that the wrapped loader was given and no iterator has begun from."""

    def choose(self, epoch: int) -> None:
        """Have the next iterator belong to ``epoch``."""
        self._next, self._chosen = epoch, True
        tell_epoch(self._loader, epoch)

    def begin(self, source: Any) -> Snapshot:
        """Where an iterator is that begins now, with ``source`` as the wrapped loader's state."""
        self._epoch = self._following
        begun = Snapshot(self._epoch, self._first, False, self._chosen, source)
        self._next, self._chosen, self._first, self._given = None, False, 0, None
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
        counters = self._epoch, self._next, self._chosen, self._first, self._snapshot, self._given
        try:
            yield
        finally:
            if source is not None:
                self._loader.load_state_dict(copy.deepcopy(source))  # type: ignore[attr-defined]
            self._epoch, self._next, self._chosen, self._first, self._snapshot, self._given = counters
            if self._chosen and self._next is not None:
                tell_epoch(self._loader, self._next)

    def reach(self, reached: Snapshot) -> None:
        """The iterator that was read last has come as far as this."""
        self._snapshot = reached

    def state_dict(self) -> dict[str, Any]:
        """Where the training loop is: the state after the batch that was handed over last, whatever has been read ahead.

        Holds the wrapped loader's own state after that batch, and what the draws of stages depend on: the seed, the epoch and
        the number of batches. Each rank has its own. With a :class:`DecodeStage` it names the decoders.

        Raises:
            Exception: What the wrapped loader raised when it was asked for its state.
        """
        reached = self._snapshot or Snapshot(self._following, 0, False, self._chosen, None)
        if isinstance(reached.source, Exception):
            raise reached.source
        versions = self._versions()
        return {"seed": self.seed, **copy.deepcopy(reached._asdict()), **({"decoders": versions} if versions else {})}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned: the next iterator begins with the batch after it.

        Stages draw what they would have drawn. Iterators that are open end. A :class:`FeatureStage` runs the first batch of
        each shape without a graph, as in every iterator.

        Args:
            state_dict: What :meth:`state_dict` returned, here or in an earlier run.

        Raises:
            ArgumentError, ArgumentTypeError: If it is no such state. Then nothing has changed.
            Exception: What the wrapped loader raises about its own part. Iterators that were open have ended then.

        Warns:
            GpuAugWarning: If images were decoded by another decoder, or by another version of it.
        """
        if not isinstance(state_dict, Mapping):
            raise ArgumentTypeError(f"state must be a mapping, got {type(state_dict).__name__}. {_WAY_OUT}")
        names = ("seed", *Snapshot._fields)
        if missing := [name for name in names if name not in state_dict]:
            raise ArgumentError(f"state must hold {', '.join(names)}, got one without {', '.join(missing)}. {_WAY_OUT}")
        seed, epoch, batch = (
            whole_number(f"state[{name!r}]", state_dict[name], _WAY_OUT, most=most)
            for name, most in (("seed", MOST_SEED), ("epoch", MOST_COUNT), ("batch", MOST_COUNT))
        )
        ended, chosen = (flag(f"state[{name!r}]", state_dict[name], _WAY_OUT) for name in ("ended", "chosen"))
        before, now = state_dict.get("decoders", {}), self._versions()
        if not isinstance(before, Mapping):
            raise ArgumentTypeError(f"state['decoders'] must be a mapping, got {type(before).__name__}. {_WAY_OUT}")
        reached = Snapshot(epoch, batch, ended, chosen, copy.deepcopy(state_dict["source"]))
        for name in before.keys() & now.keys():
            if before[name] != now[name]:
                warnings.warn(
                    f"Stage {name!r} must decode as before to give the same batches, got {now[name]} after {before[name]}. "
                    "Pixels may differ by a few values; for the same ones, resume with the decoder of then.",
                    GpuAugWarning,
                    stacklevel=2,
                )
        self._end_passes()  # what reads a loader must not meet a change of its state
        ended = reached.ended or _is_finished(reached.source)
        if reached.chosen and not ended:
            tell_epoch(self._loader, reached.epoch)
        if reached.source is not None:
            self._loader.load_state_dict(copy.deepcopy(reached.source))  # type: ignore[attr-defined]
        self.seed, self._epoch = seed, reached.epoch
        self._next, self._chosen = (None, False) if ended else (reached.epoch, reached.chosen)
        self._first = 0 if ended else reached.batch
        self._snapshot, self._given = reached, reached.source

    @property
    def _following(self) -> int:
        return self._epoch + 1 if self._next is None else self._next


def _is_finished(source: Any) -> bool:
    """Whether torchdata's loader would start over. Under Accelerate, which reads one batch ahead, it would after its last."""
    return isinstance(source, Mapping) and bool(source.get("_iterator_finished", False))
