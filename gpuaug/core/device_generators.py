"""The global generator of a device, which draws from a key for the length of a stage and is then as it was."""

from typing import Any

import torch


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
        if self._found is not None:  # or it was not lent
            self._generator.graphsafe_set_state(self._found)
            self._found = None


class _ModuleGenerator:
    """The global generator of any other accelerator, saved and restored by value."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._found: Any = None

    def lend(self, key: int) -> None:
        self._found = self._module.get_rng_state()
        self._module.manual_seed(key)

    def give_back(self) -> None:
        if self._found is not None:
            self._module.set_rng_state(self._found)
            self._found = None


def device_generator(device: torch.device) -> Any:
    """The global generator of an accelerator, to key and restore. ``None`` for the CPU, whose generator is the host's."""
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        torch.cuda.init()  # the default generators exist from here on
        return _CudaGenerator(device.index)
    return _ModuleGenerator(device)
