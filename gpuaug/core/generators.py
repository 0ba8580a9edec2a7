"""Global random generators of Python, NumPy and devices, seeded for the duration of a stage and then restored.

The seed for one stage and one batch is called *key*: an integer in [0, 2⁶³) that depends on seed, epoch, rank, batch and stage.
"""

import random
from typing import Any

import numpy as np
import torch


class PythonGenerator:
    """Python's global generator, from which the module ``random`` draws."""

    def __init__(self) -> None:
        self._saved: Any = None

    def save_and_seed(self, key: int) -> None:
        """Save the state of the generator and seed it with ``key``."""
        self._saved = random.getstate()
        random.seed(key)

    def restore(self) -> None:
        """Restore the saved state. A second call does nothing."""
        if self._saved is not None:
            random.setstate(self._saved)
            self._saved = None


class NumpyGenerator:
    """NumPy's global generator, from which the functions of ``numpy.random`` draw.

    It is replaced by a private generator, because setting a state takes longer, and the user's generator need not have a seed.
    """

    def __init__(self) -> None:
        self._private = np.random.MT19937(0)
        self._saved: Any = None

    def save_and_seed(self, key: int) -> None:
        """Save the state of the generator and seed it with ``key``."""
        self._saved = (_numpy_random.get_bit_generator(), _numpy_random.get_state(legacy=False))
        _numpy_random.set_bit_generator(self._private)
        _numpy_random.seed((key % 2**32, key >> 32, _NUMPY))

    def restore(self) -> None:
        """Restore the saved state. A second call does nothing."""
        if self._saved is None:
            return
        generator, state = self._saved
        _numpy_random.set_bit_generator(generator)
        if state["has_gauss"]:  # a normally distributed number for the next draw, which is not part of the bit generator
            _numpy_random.set_state(state)
        self._saved = None


class _CudaGenerator:
    """Global generator of a CUDA device, with a private state for the duration of a stage.

    The state object is replaced, not the values in it. So a CUDA graph that is captured within the stage uses the private
    state: replays draw from the private state, and a failed capture does not change the state from which the user draws.
    """

    def __init__(self, index: int) -> None:
        self._generator = torch.cuda.default_generators[index]
        self._private = torch.Generator(torch.device("cuda", index))
        self._saved: Any = None

    def save_and_seed(self, key: int) -> None:
        self._saved = self._generator.graphsafe_get_state()
        self._private.manual_seed(key)
        self._generator.graphsafe_set_state(self._private)

    def restore(self) -> None:
        if self._saved is not None:
            self._generator.graphsafe_set_state(self._saved)
            self._saved = None


class _ModuleGenerator:
    """Global generator of an accelerator other than CUDA. Saving it copies its state."""

    def __init__(self, device: torch.device) -> None:
        self._device_module: Any = torch.get_device_module(device)
        self._saved: Any = None

    def save_and_seed(self, key: int) -> None:
        self._saved = self._device_module.get_rng_state()
        self._device_module.manual_seed(key)

    def restore(self) -> None:
        if self._saved is not None:
            self._device_module.set_rng_state(self._saved)
            self._saved = None


def device_generator(device: torch.device) -> Any:
    """Return the global generator of an accelerator, with methods ``save_and_seed`` and ``restore``; ``None`` for the CPU."""
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        torch.cuda.init()  # creates the default generators
        return _CudaGenerator(device.index)
    return _ModuleGenerator(device)


_numpy_random: Any = np.random  # Any: its annotations lack get_bit_generator and set_bit_generator
_NUMPY = 1  # a part of NumPy's seed, because Python's generator has the same algorithm and would draw the same numbers
