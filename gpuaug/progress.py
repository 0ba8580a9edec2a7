"""How far the training loop has come, in a form that a checkpoint can hold."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from gpuaug.errors import ArgumentError, ArgumentTypeError


class Reached(NamedTuple):
    """Where the training loop is."""

    epoch: int
    batch: int
    """Batches of the epoch that were handed over."""
    ended: bool
    """Whether the epoch's end was reached, not only its last batch."""
    source: Any
    """The wrapped loader's state."""


class Progress:
    """Counts epochs and batches, and keeps the wrapped loader's state as it was at the batch that was handed over last.

    Args:
        loader: The wrapped loader.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._epoch = -1
        self._chosen = False
        self._first = 0
        self._reached: Reached | None = None

    def choose(self, epoch: int) -> None:
        """Have the next iterator belong to ``epoch``."""
        self._epoch, self._chosen = epoch, True

    def begin(self) -> tuple[int, int]:
        """The epoch of an iterator that begins now, and the number of its first batch."""
        if not self._chosen:
            self._epoch += 1
        first, self._first, self._chosen = self._first, 0, False
        return self._epoch, first

    def handed_over(self, epoch: int, batch: int, source: Any) -> None:
        """``batch`` batches of ``epoch`` have been handed over, and ``source`` is the wrapped loader's state after the last."""
        self._reached = Reached(epoch, batch, False, source)

    def ended(self, epoch: int, batch: int, source: Any) -> None:
        """The end of ``epoch`` has been reached."""
        self._reached = Reached(epoch, batch, True, source)

    def state(self, seed: int) -> dict[str, Any]:
        """What :meth:`load` takes, with what draws depend on besides."""
        reached = self._reached
        if reached is None:
            reached = Reached(self._epoch + (not self._chosen), 0, False, self._loader.state_dict())  # type: ignore[attr-defined]
        return {"seed": seed, **reached._asdict()}

    def load(self, state: Mapping[str, Any]) -> int:
        """Go on from ``state``: the next iterator begins with the batch after it. Returns the seed.

        Raises:
            ArgumentError, ArgumentTypeError: If it is no such state.
        """
        if not isinstance(state, Mapping):
            raise ArgumentTypeError(f"state must be a mapping, got {type(state).__name__}. {_WAY_OUT}")
        names = ("seed", *Reached._fields)
        if missing := [name for name in names if name not in state]:
            raise ArgumentError(f"state must hold {', '.join(names)}, got one without {', '.join(missing)}. {_WAY_OUT}")
        reached = Reached(*(state[name] for name in Reached._fields))
        self._loader.load_state_dict(reached.source)  # type: ignore[attr-defined]
        self._epoch, self._chosen = reached.epoch, not reached.ended
        self._first = 0 if reached.ended else reached.batch
        self._reached = reached
        seed: int = state["seed"]
        return seed


_WAY_OUT = "Pass what state_dict() of a StreamedLoader returned."


def is_stateful(loader: Any) -> bool:
    """Whether ``loader`` can say how far it has been read, and go on from there."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def state_reader(loader: Any, iterator: Iterator[Any]) -> Callable[[], Any]:
    """A function that says how far ``iterator`` has been read, for the thread that reads it; ``None`` if that is not known."""
    if not is_stateful(loader):
        return _no_state
    # A loader knows of its newest iterator only.
    holder: Any = iterator if callable(getattr(iterator, "state_dict", None)) else loader
    if getattr(loader, "num_workers", 0):
        read: Callable[[], Any] = holder.state_dict
        return read  # it came out of other processes, so nothing here goes on changing it
    return lambda: copy.deepcopy(holder.state_dict())


def _no_state() -> None:
    return None
