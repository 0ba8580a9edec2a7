"""Randomness that depends on a position, not on who drew before: (seed, epoch, rank, batch, stage) → draws.

A stage may be any callable, and a callable draws from torch's global generators. So for the length of a stage the global
generators are set to a state derived from the position, and put back as they were. Called twice within one stage, a pipeline
goes on drawing from where the first call ended, so the two calls differ.
"""

import hashlib
import struct
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import distributed


@dataclass(frozen=True, slots=True)
class Position:
    """Where in a run a batch is: what its draws depend on."""

    seed: int
    epoch: int
    rank: int
    batch: int

    def key(self, stage: str) -> int:
        """The seed for one stage at this position, in [0, 2⁶³).

        Example:
            >>> Position(seed=0, epoch=0, rank=0, batch=7).key("augment") == Position(0, 0, 0, 7).key("augment")
            True
        """
        where = struct.pack("<QqqQ", self.seed % 2**64, self.epoch, self.rank, self.batch)
        digest = hashlib.blake2b(where + stage.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


def default_seed() -> int:
    """The seed of torch's global generator. Reading it draws nothing."""
    return torch.initial_seed()


def default_rank() -> int:
    """This process's rank in ``torch.distributed``, or 0 where that is not in use."""
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


class Generators:
    """Torch's global generators of the host and of one device, keyed for the length of a stage.

    ``with generators.keyed(key): …`` draws from ``key`` and leaves the generators as they were found. Python's and NumPy's are
    left alone: stages that draw from them are not reproducible, and not disturbed.

    Cost:
        A few microseconds of host time. No synchronisation: a CUDA generator's state lives on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = _device_generator(device)
        self._key = 0
        self._found: Any = None

    def keyed(self, key: int) -> Self:
        """A block whose draws depend on ``key`` alone."""
        self._key = key
        return self

    def __enter__(self) -> None:
        self._found = torch.default_generator.get_state()
        torch.default_generator.manual_seed(self._key)
        if self._device is not None:
            self._device.lend(self._key)

    def __exit__(self, *exc: object) -> None:
        try:
            torch.default_generator.set_state(self._found)
        finally:
            if self._device is not None:
                self._device.give_back()


class _CudaGenerator:
    """The global generator of a CUDA device, lent a private state for the length of a stage.

    The state object is exchanged, not its values. A graph captured within the block then registers the private state: its
    replays draw from the key, and a capture that fails leaves nothing of itself in the state that the user draws from.
    """

    def __init__(self, index: int) -> None:
        self._generator = torch.cuda.default_generators[index]
        self._private = torch.Generator(torch.device("cuda", index))
        self._found: Any = None

    def lend(self, key: int) -> None:
        self._found = self._generator.graphsafe_get_state()
        self._private.manual_seed(key)
        self._generator.graphsafe_set_state(self._private)

    def give_back(self) -> None:
        self._generator.graphsafe_set_state(self._found)


class _ModuleGenerator:
    """The global generator of any other accelerator, saved and restored by value."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._found: Any = None

    def lend(self, key: int) -> None:
        self._found = self._module.get_rng_state()
        self._module.manual_seed(key)

    def give_back(self) -> None:
        self._module.set_rng_state(self._found)


def _device_generator(device: torch.device) -> Any:
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        torch.cuda.init()  # the default generators exist from here on
        return _CudaGenerator(device.index)
    return _ModuleGenerator(device)
