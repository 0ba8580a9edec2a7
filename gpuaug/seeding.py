"""Randomness that depends on a position, not on who drew before: (seed, epoch, rank, batch, stage) → draws.

A stage may be any callable, and a callable draws from torch's global generators. So for the length of a stage the global
generators are set to a state derived from the position, and put back as they were. Called twice within one stage, a pipeline
goes on drawing from where the first call ended, so the two calls differ.
"""

import hashlib
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

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
    """Torch's global generators of the host and of one device.

    Python's and NumPy's generators are left alone: stages that draw from them are not reproducible, and not disturbed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = _device_generator(device)

    @contextmanager
    def keyed(self, key: int) -> Iterator[None]:
        """Let the global generators draw from ``key`` within the block, and leave them as they were found.

        Cost:
            A few microseconds of host time. No synchronisation: a CUDA generator's state lives on the host.
        """
        host = torch.default_generator
        found = host.get_state()
        with ExitStack() as stack:
            stack.callback(host.set_state, found)
            host.manual_seed(key)
            if self._device is not None:
                stack.enter_context(self._device.keyed(key))
            yield


class _CudaGenerator:
    """The global generator of a CUDA device, lent a private state for the length of a stage.

    The state object is exchanged, not its values. A graph captured within the block then registers the private state: its
    replays draw from the key, and a capture that fails leaves nothing of itself in the state that the user draws from.
    """

    def __init__(self, index: int) -> None:
        self._generator = torch.cuda.default_generators[index]
        self._private = torch.Generator(torch.device("cuda", index))

    @contextmanager
    def keyed(self, key: int) -> Iterator[None]:
        found = self._generator.graphsafe_get_state()
        self._generator.graphsafe_set_state(self._private)
        try:
            self._generator.manual_seed(key)
            yield
        finally:
            self._generator.graphsafe_set_state(found)


class _ModuleGenerator:
    """The global generator of any other accelerator, saved and restored by value."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)

    @contextmanager
    def keyed(self, key: int) -> Iterator[None]:
        found = self._module.get_rng_state()
        try:
            self._module.manual_seed(key)
            yield
        finally:
            self._module.set_rng_state(found)


def _device_generator(device: torch.device) -> Any:
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        torch.cuda.init()  # the default generators exist from here on
        return _CudaGenerator(device.index)
    return _ModuleGenerator(device)
