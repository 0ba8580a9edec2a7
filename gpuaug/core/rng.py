"""Random numbers keyed by position, (seed, epoch, rank, batch index, stage), and not by earlier draws.

A stage may be any callable, and a callable draws from the global generators of torch, Python and NumPy. So for the length of a
stage these are set to a state derived from the position, and put back as they were. Called twice within one stage, a pipeline
goes on drawing from where the first call ended, so the two calls differ.

A stage with numbers of its own (``fuse``) takes one seed a call (``next_seed``), and may ask for the seeds of the calls
expected after it (``following_seeds``).

The global generators are the process's, not a thread's. So stages of loaders that are iterated in several threads take turns,
and whoever draws from these generators here waits for its turn. A thread of the user's that draws meanwhile cannot be seen.
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
A stage that takes longer either compiles, or waits for the thread that waits for it."""


Drawn = TypeVar("Drawn")


class GeneratorLock:
    """Held by the thread whose stage uses the global generators. Re-entrant: a stage may iterate another loader."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._of_fork = threading.local()
        self.blocks: list[Generators] = []
        """Blocks of ``Generators`` that the holding thread is in, outermost first."""
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._before_fork, after_in_parent=self._after_fork_in_parent, after_in_child=self._after_fork_in_child
            )

    def __enter__(self) -> None:
        """Wait until no other thread is in a stage.

        Raises:
            GpuAugError: If it does not end.
        """
        if not (self._lock.acquire(False) or self._lock.acquire(timeout=STAGE_WAIT_S)):  # the former in a third of the time
            raise GpuAugError(
                "A stage could not take torch's global generators, because another thread's stage has had them for "
                f"{STAGE_WAIT_S:.0f} s. If that one waits for this thread, call what draws on the stage's own thread. If it "
                "compiles, run a batch of it before other threads begin."
            )

    def __exit__(self, *exc: object) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            return  # in a child that was forked within the block, and has another lock

    @property
    def in_a_block(self) -> bool:
        """Whether the calling thread is in a block of ``Generators``."""
        return bool(self.blocks) and self._lock._is_owned()  # type: ignore[attr-defined]

    def recover(self) -> None:
        """Leave blocks that an interrupt at the first line of their ``__exit__`` has kept open.

        For a thread that has left all its blocks.
        """
        _local.calls = None
        if not self._lock._is_owned():  # type: ignore[attr-defined]
            return
        while self.blocks:
            self.blocks[-1].put_back()
            self.blocks.pop()
        while self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock.release()

    def draw(self, draw: Callable[[], Drawn]) -> Drawn:
        """Call ``draw``, which reads the user's generators, while no other thread is in a stage. Returns its result."""
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

    # A child that is forked in the middle of another thread's stage would have that stage's numbers for the user's, and a
    # generator that is locked for ever if the stage was drawing.

    def _before_fork(self) -> None:
        self._of_fork.held = self._lock.acquire(timeout=FORK_WAIT_S)

    def _after_fork_in_parent(self) -> None:
        held = getattr(self._of_fork, "held", False)
        self._of_fork.held = False
        if held:
            self._lock.release()

    def _after_fork_in_child(self) -> None:
        # Also where the thread that forked has the old one, as a loader that starts its workers: a worker never gives it back.
        self._lock = threading.RLock()
        if not getattr(self._of_fork, "held", False):
            self.blocks = []  # the child does not have the thread that was in them


generator_lock = GeneratorLock()


class Position(NamedTuple):
    """Random-number key of a batch: its place in a run."""

    seed: int
    epoch: int
    rank: int
    batch: int

    def after(self) -> "Position":
        """The position of the batch that follows."""
        return Position(self.seed, self.epoch, self.rank, self.batch + 1)

    def key(self, stage: str) -> int:
        """The seed for one stage at this position, in [0, 2⁶³).

        Examples:
            >>> Position(seed=0, epoch=0, rank=0, batch=7).key("augment") == Position(0, 0, 0, 7).key("augment")
            True
        """
        return _key(*self, stage)


# A stage that draws ahead asks for the keys of the next batches, and each again at its batch.
@functools.lru_cache(maxsize=1024)
def _key(seed: int, epoch: int, rank: int, batch: int, stage: str) -> int:
    where = struct.pack("<QQqQ", seed % 2**64, epoch % 2**64, rank, batch)
    digest = hashlib.blake2b(where + stage.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Calls:
    """The seeds of the calls within one stage at one position: each call has its own.

    ``with calls: …`` is a block in which ``next_seed`` gives them. A stage that draws from nothing else has no ``Generators``.
    """

    def __init__(self, position: Position, stage: str) -> None:
        self._position = position
        self._stage = stage
        self._made = 0
        self._outer: Calls | None = None

    def __enter__(self) -> None:
        self._outer = getattr(_local, "calls", None)
        _local.calls = self

    def __exit__(self, *exc: object) -> None:
        _local.calls = self._outer

    def next(self) -> int:
        """The seed of a call that is being made."""
        self._made += 1
        return self._position.key(f"{self._stage}/{self._made}")

    def following(self, count: int) -> list[int]:
        """Seeds of the same call for the next ``count`` batches."""
        at = self._position
        name = f"{self._stage}/{self._made}"
        return [Position(at.seed, at.epoch, at.rank, at.batch + 1 + index).key(name) for index in range(count)]


_local = threading.local()


def next_seed() -> int:
    """The seed for one call, in [0, 2⁶³). From the position within a stage, else drawn from torch's generator."""
    calls: Calls | None = getattr(_local, "calls", None)
    if calls is not None:
        return calls.next()
    cell: torch.Tensor | None = getattr(_local, "cell", None)
    if cell is None:
        with torch.inference_mode(False):  # or it could not be written to outside of that mode
            cell = _local.cell = torch.empty((), dtype=torch.int64, device="cpu")
    # The same number as torch.randint's, in half its time.
    return int(generator_lock.draw(partial(cell.random_, 0, _SEEDS)).item())


def following_seeds(count: int) -> list[int]:
    """The next ``count`` results of ``next_seed`` if nothing else draws. Advances no generator."""
    calls: Calls | None = getattr(_local, "calls", None)
    if calls is not None:
        return calls.following(count)
    # Drawn from a copy: to draw and put back would undo what another thread draws meanwhile.
    copy: torch.Generator | None = getattr(_local, "copy", None)
    if copy is None:
        copy = _local.copy = torch.Generator("cpu")
    copy.set_state(generator_lock.draw(torch.default_generator.get_state))
    made: list[int] = torch.randint(0, _SEEDS, (count,), generator=copy, device="cpu").tolist()
    return made


def seeds_of_views(seed: int, views: int) -> list[int]:
    """Seeds of the views of one call. The first view has the call's own seed."""
    return [(seed + index * _GOLDEN) % _SEEDS for index in range(views)]


_SEEDS = 2**63 - 1
_GOLDEN = 0x1E3779B97F4A7C15  # seeds far apart, so that the views of one call meet no other's


def default_seed() -> int:
    """The seed of torch's global generator. Reading it draws nothing."""
    return generator_lock.draw(torch.initial_seed)


def default_rank() -> int:
    """This process's rank in ``torch.distributed``, or 0 where that is not in use."""
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


class _HostState:
    """A state of torch's CPU generator that depends on all 63 bits of a key. ``manual_seed`` uses only 32 bits.

    ``torch.initial_seed()`` gives the key.
    """

    def __init__(self) -> None:
        self._state = torch.Generator("cpu").get_state()
        self._words = self._state.numpy().view(np.uint64)
        self._twister = self._words[3 : 3 + TWISTER]  # after the seed, "left" and "seeded", "next"
        self._keyed = KeyedWords(0)

    def of(self, key: int) -> torch.Tensor:
        """The state for a key in [0, 2⁶³), to be read before the next call."""
        self._twister[:] = self._keyed.of(key)
        self._words[0] = key
        return self._state


_host_state = _HostState()


class Generators:
    """Torch's global generators of the host and of one device, and Python's and NumPy's, keyed for the length of a stage.

    ``with generators.keyed(key): …`` draws from ``key`` and leaves the generators as they were found. Other threads' blocks
    wait for the end of this one; blocks may be nested.

    Args:
        device: Of torch's other generator.
        libraries: Whether Python's and NumPy's are keyed too. A stage that draws from torch alone does without.

    Raises:
        GpuAugError: On entering, if another thread's block does not end.

    Cost:
        Three microseconds of host time, and six more with those of the libraries. No synchronisation: a CUDA generator's state
        lives on the host.
    """

    def __init__(self, device: torch.device, *, libraries: bool = False) -> None:
        of_device = device_generator(device)
        self._others = [of_device] if of_device is not None else []
        if libraries:
            self._others += [PythonGenerator(), NumpyGenerator()]
        self._key = 0
        self._outer: Calls | None = None
        self._found: torch.Tensor | None = None
        """The host generator's state before the block, and ``None`` outside of one."""

    def keyed(self, key: int) -> Self:
        """A block whose draws depend on ``key`` alone."""
        self._key = key
        return self

    def __enter__(self) -> None:
        generator_lock.__enter__()
        generator_lock.blocks.append(self)
        try:
            self._outer = getattr(_local, "calls", None)
            self._found = torch.default_generator.get_state()
            _local.calls = None
            torch.default_generator.set_state(_host_state.of(self._key))
            for other in self._others:
                other.lend(self._key)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        try:
            self.put_back()
        except BaseException:
            self.put_back()  # an interrupt may arrive at its first line
            raise
        finally:
            generator_lock.blocks.pop()
            generator_lock.__exit__()

    def put_back(self) -> None:
        """Restore the states of the generators before the block. A second call does nothing."""
        if self._found is None:
            return
        _local.calls = self._outer
        try:
            torch.default_generator.set_state(self._found)
        finally:
            for other in self._others:
                other.give_back()
        self._found = None
