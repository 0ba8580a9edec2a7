"""Random numbers that depend on the position (seed, epoch, rank, batch index, stage) and not on earlier draws.

A stage may be any callable, and a callable may draw from the global generators of torch, Python and NumPy. So for the duration
of a stage these generators are set to a state derived from the position, and restored afterwards. If a pipeline is called twice
within one stage, the second call continues the sequence of the first, so the two calls differ.

A stage that draws its own numbers (``fuse``) takes one seed per call (``next_seed``), and may ask for the seeds of the next
batches' calls (``following_seeds``).

The global generators belong to the process, not to a thread. So stages of loaders that are iterated in several threads take
turns, and code in this module that draws from these generators waits for its turn. A user's thread that draws meanwhile is not
detected.
"""

import functools
import hashlib
import os
import struct
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import distributed

from gpuaug.core.errors import GpuAugError, GpuAugWarning
from gpuaug.core.generators import TWISTER, KeyedWords, NumpyGenerator, PythonGenerator, device_generator

STAGE_WAIT_S, DRAW_WAIT_S, FORK_WAIT_S = 120.0, 1.0, 1.0
"""Seconds to wait for another thread's stage: before a stage, before a draw outside of stages, and before a fork.
A stage that takes longer is either compiling or deadlocked with the waiting thread."""


Drawn = TypeVar("Drawn")


class GeneratorLock:
    """Lock of the thread whose stage uses the global generators. Re-entrant: a stage may iterate another loader."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._of_fork = threading.local()
        self.blocks: list[Generators] = []
        """``Generators`` contexts that the holding thread has entered, outermost first."""
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._before_fork, after_in_parent=self._after_fork_in_parent, after_in_child=self._after_fork_in_child
            )

    def __enter__(self) -> None:
        """Wait until no other thread is in a stage.

        Raises:
            GpuAugError: If the other thread's stage does not end within ``STAGE_WAIT_S``.
        """
        # acquire(False) takes a third of the time of acquire(timeout=…).
        if not (self._lock.acquire(False) or self._lock.acquire(timeout=STAGE_WAIT_S)):
            raise GpuAugError(
                "A stage could not take torch's global generators, because another thread's stage has had them for "
                f"{STAGE_WAIT_S:.0f} s. If that one waits for this thread, call what draws on the stage's own thread. If it "
                "compiles, run a batch of it before other threads begin."
            )

    def __exit__(self, *exc: object) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            return  # in a child process that was forked within the context: it has a new lock

    @property
    def in_a_block(self) -> bool:
        """Whether the calling thread is in a ``Generators`` context."""
        return bool(self.blocks) and self._lock._is_owned()  # type: ignore[attr-defined]

    def recover(self) -> None:
        """Exit contexts that stayed open because an interrupt arrived at the first line of their ``__exit__``.

        Call it on a thread that has left all its ``with`` blocks.
        """
        _local.calls = None
        if not self._lock._is_owned():  # type: ignore[attr-defined]
            return
        while self.blocks:
            self.blocks[-1].restore()
            self.blocks.pop()
        while self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock.release()

    def draw(self, draw: Callable[[], Drawn]) -> Drawn:
        """Call ``draw``, which reads the user's generators, while no other thread is in a stage, and return its result."""
        if not (self._lock.acquire(False) or self._lock.acquire(timeout=DRAW_WAIT_S)):
            warnings.warn(
                "A call draws the numbers of a stage, because that stage, on another thread, has taken more than "
                f"{DRAW_WAIT_S:.0f} s. Call what draws on the stage's own thread, or in a stage.",
                GpuAugWarning,
                stacklevel=3,
            )
            return draw()
        try:
            return draw()
        finally:
            self._lock.release()

    # A child process forked during another thread's stage would use that stage's generator states as the user's, and a
    # generator that is locked forever if the stage was drawing.

    def _before_fork(self) -> None:
        self._of_fork.held = self._lock.acquire(timeout=FORK_WAIT_S)

    def _after_fork_in_parent(self) -> None:
        held = getattr(self._of_fork, "held", False)
        self._of_fork.held = False
        if held:
            self._lock.release()

    def _after_fork_in_child(self) -> None:
        # Also if the forking thread holds the old lock, as a loader does when it starts workers: a worker never releases it.
        self._lock = threading.RLock()
        if not getattr(self._of_fork, "held", False):
            self.blocks = []  # the thread that entered them does not exist in the child


generator_lock = GeneratorLock()


class Position(NamedTuple):
    """Position of a batch in a run. It determines the batch's random numbers."""

    seed: int
    epoch: int
    rank: int
    batch: int

    def after(self) -> "Position":
        """Position of the next batch."""
        return Position(self.seed, self.epoch, self.rank, self.batch + 1)

    def key(self, stage: str) -> int:
        """Seed of one stage at this position, in [0, 2⁶³).

        Examples:
            >>> Position(seed=0, epoch=0, rank=0, batch=7).key("augment") == Position(0, 0, 0, 7).key("augment")
            True
        """
        return _key(*self, stage)


# Cached: a stage that draws ahead asks for a key in advance, and again at the batch itself.
@functools.lru_cache(maxsize=1024)
def _key(seed: int, epoch: int, rank: int, batch: int, stage: str) -> int:
    position = struct.pack("<QQqQ", seed % 2**64, epoch % 2**64, rank, batch)
    digest = hashlib.blake2b(position + stage.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Calls:
    """Seeds of the calls within one stage at one position, one seed per call.

    Within ``with calls: …``, ``next_seed`` returns them. A stage that draws only from these seeds needs no ``Generators``.
    """

    def __init__(self, position: Position, stage: str) -> None:
        self._position = position
        self._stage = stage
        self._calls = 0
        self._outer: Calls | None = None

    def __enter__(self) -> None:
        self._outer = getattr(_local, "calls", None)
        _local.calls = self

    def __exit__(self, *exc: object) -> None:
        _local.calls = self._outer

    def next(self) -> int:
        """Seed of the next call."""
        self._calls += 1
        return self._position.key(f"{self._stage}/{self._calls}")

    def following(self, count: int) -> list[int]:
        """Seeds of the current call in the next ``count`` batches."""
        current = self._position
        name = f"{self._stage}/{self._calls}"
        return [_key(*current[:3], current.batch + 1 + index, name) for index in range(count)]


_local = threading.local()


def next_seed() -> int:
    """Seed for one call, in [0, 2⁶³): derived from the position within a stage, else drawn from torch's generator."""
    calls: Calls | None = getattr(_local, "calls", None)
    if calls is not None:
        return calls.next()
    cell: torch.Tensor | None = getattr(_local, "cell", None)
    if cell is None:
        with torch.inference_mode(False):  # an inference tensor cannot be written to outside of inference mode
            cell = _local.cell = torch.empty((), dtype=torch.int64, device="cpu")
    # Draws the same number as torch.randint in half the time.
    return int(generator_lock.draw(partial(cell.random_, 0, _SEEDS)).item())


def following_seeds(count: int) -> list[int]:
    """Next ``count`` results of ``next_seed``, provided that nothing else draws. Advances no generator."""
    calls: Calls | None = getattr(_local, "calls", None)
    if calls is not None:
        return calls.following(count)
    # Drawn from a copy: restoring the global generator would undo draws of another thread.
    copy: torch.Generator | None = getattr(_local, "copy", None)
    if copy is None:
        copy = _local.copy = torch.Generator("cpu")
    copy.set_state(generator_lock.draw(torch.default_generator.get_state))
    seeds: list[int] = torch.randint(0, _SEEDS, (count,), generator=copy, device="cpu").tolist()
    return seeds


def seeds_of_views(seed: int, views: int) -> list[int]:
    """Seeds of the views of one call. The seed of the first view is ``seed``."""
    return [(seed + index * _GOLDEN) % _SEEDS for index in range(views)]


_SEEDS = 2**63 - 1
_GOLDEN = 0x1E3779B97F4A7C15  # distance between the seeds of views, large so that views of different calls do not coincide


def default_seed() -> int:
    """Initial seed of torch's global generator. Reading it draws nothing."""
    return generator_lock.draw(torch.initial_seed)


def default_rank() -> int:
    """Rank of this process in ``torch.distributed``, or 0 if that is not initialized."""
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


class _HostState:
    """State of torch's CPU generator that depends on all 63 bits of a key. ``manual_seed`` uses only 32 bits.

    ``torch.initial_seed()`` returns the key.
    """

    def __init__(self) -> None:
        self._state = torch.Generator("cpu").get_state()
        self._words = self._state.numpy().view(np.uint64)
        self._twister = self._words[3 : 3 + TWISTER]  # after the fields "seed", "left" with "seeded", and "next"
        self._keyed = KeyedWords(0)

    def of(self, key: int) -> torch.Tensor:
        """State for a key in [0, 2⁶³). The next call overwrites it."""
        self._twister[:] = self._keyed.of(key)
        self._words[0] = key
        return self._state


_host_state = _HostState()


class Generators:
    """Global generators of torch (of the host and of one device), Python and NumPy, seeded for the duration of a stage.

    Within ``with generators.keyed(key): …`` all draws depend on ``key``; afterwards the generators have their former states.
    Another thread's context waits until this one ends. Contexts may be nested.

    Args:
        device: Device of the second torch generator.
        libraries: Whether the generators of Python and NumPy are seeded too. A stage that draws from torch only needs no more.

    Raises:
        GpuAugError: On entering, if another thread's context does not end.

    Cost:
        3 µs of host time, and 6 µs more with ``libraries``. No synchronisation: the state of a CUDA generator is on the host.
    """

    def __init__(self, device: torch.device, *, libraries: bool = False) -> None:
        of_device = device_generator(device)
        self._others = [of_device] if of_device is not None else []
        if libraries:
            self._others += [PythonGenerator(), NumpyGenerator()]
        self._key = 0
        self._outer: Calls | None = None
        self._saved: torch.Tensor | None = None
        """State of torch's CPU generator before the context; ``None`` outside of the context."""

    def keyed(self, key: int) -> Self:
        """Context manager in which draws depend on ``key`` only."""
        self._key = key
        return self

    def __enter__(self) -> None:
        generator_lock.__enter__()
        generator_lock.blocks.append(self)
        try:
            self._outer = getattr(_local, "calls", None)
            self._saved = torch.default_generator.get_state()
            _local.calls = None
            torch.default_generator.set_state(_host_state.of(self._key))
            for other in self._others:
                other.save_and_seed(self._key)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        try:
            self.restore()
        except BaseException:
            self.restore()  # an interrupt may have arrived at the first line of the first call
            raise
        finally:
            generator_lock.blocks.pop()
            generator_lock.__exit__()

    def restore(self) -> None:
        """Restore the states that the generators had before the context. A second call does nothing."""
        if self._saved is None:
            return
        _local.calls = self._outer
        try:
            torch.default_generator.set_state(self._saved)
        finally:
            for other in self._others:
                other.restore()
        self._saved = None
