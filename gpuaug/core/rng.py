"""Random numbers that depend on the position (seed, epoch, rank, batch index) and the stage, and not on earlier draws.

A stage may be any callable, which may draw from the global generators of torch, Python and NumPy. So for the duration of a
stage, these generators are set to a state that is derived from the position and the stage, and restored afterwards. If a
pipeline is called twice within one stage, the second call continues the sequence of random numbers, so the two calls differ.

A pipeline of ``gpuaug.fuse`` draws from its own generators. It takes one seed per call (``next_seed``), and can compute random
numbers of later batches from the seeds of their calls (``following_seeds``).

The global generators belong to the process, not to a thread. So only one thread at a time can be in a stage
(``GeneratorLock``), and functions of this module that draw from these generators wait until no thread is in a stage. Draws of
the user's other threads during a stage are not detected.
"""

import functools
import hashlib
import os
import random
import struct
import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import distributed

from gpuaug.core.errors import GpuAugError, warn
from gpuaug.core.generators import GlobalGenerator, device_generator, numpy_generator, python_generator

STAGE_WAIT_S, DRAW_WAIT_S, FORK_WAIT_S = 120.0, 1.0, 1.0
"""Seconds to wait for another thread's stage: before a stage, before a draw outside of stages, and before a fork.

A stage that takes longer than ``STAGE_WAIT_S`` either compiles, or waits for the thread that waits for the stage (a deadlock).
"""

POLL_S = 0.05
"""Seconds between two checks whether a thread that waits for a stage should stop waiting."""

_SEED_LIMIT = 2**63 - 1
"""Exclusive limit of seeds that are drawn."""

_VIEW_DISTANCE = 0x1E3779B97F4A7C15
"""Distance between the seeds of two views, so large that seeds of views of different calls do not coincide."""

T = TypeVar("T")


class _ThreadState(threading.local):
    """State of the calling thread."""

    call_seeds: "CallSeeds | None" = None
    """Seeds of the stage that the thread is in; ``None`` outside of stages."""
    holds_lock_for_fork: bool = False
    """Whether ``GeneratorLock._before_fork`` has acquired the lock on this thread."""


_local = _ThreadState()


class GeneratorLock:
    """Lock that a thread holds while its stage uses the global generators.

    Re-entrant, because a stage may iterate another loader.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.contexts: list[Generators] = []
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
                "A stage could not use torch's global generators, because a stage of another thread has used them for "
                f"{STAGE_WAIT_S:.0f} s. If the other stage waits for this thread, do not draw random numbers in this thread. "
                "If the other stage compiles, run its first batch before other threads begin."
            )

    def __exit__(self, *exc: object) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            return  # the process was forked within the context, and this process has a new lock

    @property
    def in_context(self) -> bool:
        """Whether the calling thread is within a ``Generators`` context."""
        return bool(self.contexts) and self._lock._is_owned()  # type: ignore[attr-defined]

    def recover(self) -> None:
        """Exit contexts that stayed open because an interrupt arrived at the first line of their ``__exit__``.

        Call this method on a thread that is not within a ``with`` block of this module.
        """
        _local.call_seeds = None
        if not self._lock._is_owned():  # type: ignore[attr-defined]
            return
        while self.contexts:
            self.contexts[-1].restore()
            self.contexts.pop()
        while self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock.release()

    def draw(self, function: Callable[[], T]) -> T:
        """Call a function that reads the user's generators, while no other thread is in a stage, and return its result."""
        is_acquired = self._lock.acquire(False) or self._lock.acquire(timeout=DRAW_WAIT_S)
        if not is_acquired:
            warn(
                "Random numbers outside of a stage are drawn from the state of a stage, because the stage, on another thread, "
                f"has taken more than {DRAW_WAIT_S:.0f} s. Draw on the thread of the stage, or within a stage."
            )
        try:
            return function()
        finally:
            if is_acquired:
                self._lock.release()

    def draw_unless(self, is_stopped: Callable[[], bool], function: Callable[[], T]) -> T | None:
        """Like ``draw``, but wait as long as a stage may take. Return ``None`` if ``is_stopped()`` becomes true meanwhile."""
        for _ in range(int(STAGE_WAIT_S / POLL_S)):
            if is_stopped():
                return None
            if self._lock.acquire(timeout=POLL_S):
                try:
                    return function()
                finally:
                    self._lock.release()
        return self.draw(function)

    # A fork waits for the end of another thread's stage. Otherwise the generators of the forked process would stay in the state
    # of the stage, and if the stage was drawing, the lock inside a generator would stay locked forever.

    def _before_fork(self) -> None:
        _local.holds_lock_for_fork = self._lock.acquire(timeout=FORK_WAIT_S)

    def _after_fork_in_parent(self) -> None:
        if _local.holds_lock_for_fork:
            _local.holds_lock_for_fork = False
            self._lock.release()

    def _after_fork_in_child(self) -> None:
        # A new lock, also if the forking thread holds the old one, as when a loader starts workers: no worker would release the
        # old lock.
        self._lock = threading.RLock()
        if not _local.holds_lock_for_fork:
            self.contexts = []  # the thread that entered them does not exist in the forked process


generator_lock = GeneratorLock()


class Position(NamedTuple):
    """Position of a batch in a run. Together with the name of a stage, it determines the random numbers of the stage."""

    seed: int
    epoch: int
    rank: int
    batch: int

    def after(self) -> "Position":
        """Return the position of the next batch."""
        return Position(self.seed, self.epoch, self.rank, self.batch + 1)

    def key(self, stage: str) -> int:
        """Return the seed of one stage at this position, in [0, 2⁶³).

        Examples:
            >>> Position(seed=0, epoch=0, rank=0, batch=7).key("augment") == Position(0, 0, 0, 7).key("augment")
            True
        """
        return _key(*self, stage)


# Cached, because a stage that draws for later batches computes the key of a batch in advance, and once more at the batch.
@functools.lru_cache(maxsize=1024)
def _key(seed: int, epoch: int, rank: int, batch: int, stage: str) -> int:
    """Return ``Position(seed, epoch, rank, batch).key(stage)``."""
    position = struct.pack("<QQqQ", seed % 2**64, epoch % 2**64, rank, batch)
    digest = hashlib.blake2b(position + stage.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class CallSeeds:
    """Seeds for the calls of pipelines within one stage at one position, one seed per call.

    Within ``with call_seeds: …``, ``next_seed`` returns these seeds. A stage that draws only from these seeds needs no
    ``Generators``.

    Args:
        position: Position of the batch.
        stage: Name of the stage.
    """

    def __init__(self, position: Position, stage: str) -> None:
        self._position = position
        self._stage = stage
        self._call_count = 0
        """Number of calls of ``next`` so far."""
        self._outer: CallSeeds | None = None
        """Seeds of the stage that iterates the loader of this stage; ``None`` for most stages."""

    def __enter__(self) -> None:
        self._outer = _local.call_seeds
        _local.call_seeds = self

    def __exit__(self, *exc: object) -> None:
        _local.call_seeds = self._outer

    def next(self) -> int:
        """Return the seed of the next call."""
        self._call_count += 1
        return self._position.key(f"{self._stage}/{self._call_count}")

    def following(self, count: int) -> list[int]:
        """Return the seeds that the last call of ``next`` will have in the next ``count`` batches."""
        position = self._position
        name = f"{self._stage}/{self._call_count}"
        return [position._replace(batch=position.batch + 1 + index).key(name) for index in range(count)]


def next_seed() -> int:
    """Return the seed for one call of a pipeline, in [0, 2⁶³).

    Within a stage, the seed depends on the position and the stage. Outside of stages, torch's global generator draws it.
    """
    if _local.call_seeds is not None:
        return _local.call_seeds.next()
    return int(generator_lock.draw(partial(torch.randint, 0, _SEED_LIMIT, (), device="cpu")))


def following_seeds(count: int) -> list[int]:
    """Return the next ``count`` results of ``next_seed``, if no other random numbers are drawn. Advances no generator.

    Within a stage, these are the seeds of the same call in the next ``count`` batches.
    """
    if _local.call_seeds is not None:
        return _local.call_seeds.following(count)
    # Drawn from a copy of the global generator. Another thread could draw before the original was restored.
    generator = generator_lock.draw(torch.default_generator.clone_state)
    seeds: list[int] = torch.randint(0, _SEED_LIMIT, (count,), generator=generator, device="cpu").tolist()
    return seeds


def seeds_of_views(seed: int, views: int) -> list[int]:
    """Return one seed per view (random augmentation) of a batch. The first is ``seed``, the seed of the call."""
    return [(seed + index * _VIEW_DISTANCE) % _SEED_LIMIT for index in range(views)]


def default_seed() -> int:
    """Return the initial seed of torch's global generator. Draws nothing."""
    return generator_lock.draw(torch.initial_seed)


def default_rank() -> int:
    """Return the rank of this process in ``torch.distributed``; 0 if ``torch.distributed`` is not initialized."""
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


_host_state = torch.Generator("cpu").get_state()
_words = _host_state.numpy().view(np.uint64)
_twister = _words[3 : 3 + 624]  # after the fields "seed", "left" with "seeded", and "next"
_weights = np.frombuffer(random.Random(0).randbytes(8 * 624), "<u8")
_products = np.empty(624, "<u8")
_upper_halves = _products.view("<u4")[1::2]


def _host_state_of(key: int) -> torch.Tensor:
    """Return the state of torch's CPU generator for a key in [0, 2⁶³). The next call overwrites it.

    The state depends on all 63 bits; ``manual_seed`` would use only 32 of them. Word ``i`` of the Mersenne Twister is the upper
    half of ``weight[i] * (2 * key + 1)`` modulo 2⁶⁴. While the state is set, ``torch.initial_seed()`` returns the key.
    """
    np.multiply(_weights, 2 * key + 1, out=_products)
    _twister[:] = _upper_halves
    _words[0] = key
    return _host_state


_HOST = GlobalGenerator(
    lambda: partial(torch.default_generator.set_state, torch.default_generator.get_state()),
    lambda key: torch.default_generator.set_state(_host_state_of(key)),
)
"""Torch's generator of the host."""


class Generators:
    """Global generators of torch (of the host and of one device), Python and NumPy, seeded for the duration of a stage.

    Within ``with generators.keyed(key): …`` all draws depend on ``key``. At the end of the context, the generators are restored
    to their earlier states. Entering waits while another thread is within such a context. Contexts may be nested.

    Args:
        device: Device whose generator is seeded in addition to the host's.
        libraries: Whether the generators of Python and NumPy are seeded, too.

    Raises:
        GpuAugError: On entering, if another thread's context does not end.

    Cost:
        10 µs of host time, and 130 µs more with ``libraries``. No synchronisation: states of CUDA generators are on the host.
    """

    def __init__(self, device: torch.device, *, libraries: bool = False) -> None:
        library_generators = [python_generator(), numpy_generator()] if libraries else []
        generators = [_HOST, device_generator(device), *library_generators]
        self._generators = [generator for generator in generators if generator is not None]
        self._key = 0
        self._outer: CallSeeds | None = None
        self._restores: list[Callable[[], object]] = []
        """Functions that restore the states from before the context; empty outside of the context."""

    def keyed(self, key: int) -> Self:
        """Return a context manager in which draws depend only on ``key``."""
        self._key = key
        return self

    def __enter__(self) -> None:
        generator_lock.__enter__()
        generator_lock.contexts.append(self)
        try:
            self._outer = _local.call_seeds
            self._restores = [generator.save() for generator in self._generators]
            _local.call_seeds = None
            for generator in self._generators:
                generator.seed(self._key)
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
            generator_lock.contexts.pop()
            generator_lock.__exit__()

    def restore(self) -> None:
        """Restore the states that the generators had before the context. A second call does nothing, if no function raised."""
        if not self._restores:
            return
        _local.call_seeds = self._outer
        errors = []
        for restore in self._restores:
            try:
                restore()
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors.pop()
        self._restores = []
