"""The global generators of Python, NumPy and devices, which draw from a key for the length of a stage and are then restored.

Those of Python and NumPy are Mersenne Twisters. Saving, seeding and restoring them by the functions of their libraries takes
200 µs, which is longer than many stages. So NumPy's is exchanged for another, and the state of Python's is read and written
where it lies.
"""

import _random
import ctypes
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

TWISTER = 624  # words of a state


class KeyedWords:
    """States of a Mersenne Twister that depend on all bits of a key in [0, 2⁶³).

    Word ``i`` is the upper half of ``weight[i] * (2 * key + 1)`` modulo 2⁶⁴.

    Args:
        number: Of the weights. Generators with one key and other weights draw other numbers.
    """

    def __init__(self, number: int) -> None:
        self._weights = np.frombuffer(random.Random(number).randbytes(8 * TWISTER), "<u8")
        self._products = np.empty(TWISTER, "<u8")
        self._words = self._products.view("<u4")[1::2]

    def of(self, key: int) -> NDArray[np.uint32]:
        """(624,) the words for a key, to be read before the next call."""
        np.multiply(self._weights, 2 * key + 1, out=self._products)
        return self._words


class PythonGenerator:
    """Python's global generator, of ``random``."""

    def __init__(self) -> None:
        self._found: Any = None
        self._kept = np.empty(1 + TWISTER, np.uint32)

    def lend(self, key: int) -> None:
        """Save its state and seed it with ``key``."""
        if _python_state is None:
            self._found = _python.getstate()
            _python.seed(key)
            return
        self._kept[:] = _python_state
        self._found = (_python.gauss_next,)
        _python.gauss_next = None
        _python_state[1:] = _python_words.of(key)
        _python_state[0] = TWISTER  # all words of this state have been drawn

    def give_back(self) -> None:
        """Restore the saved state. A second call does nothing."""
        if self._found is None:
            return
        if _python_state is None:
            _python.setstate(self._found)
        else:
            _python_state[:] = self._kept
            (_python.gauss_next,) = self._found
        self._found = None


class NumpyGenerator:
    """NumPy's global generator, of ``numpy.random``."""

    def __init__(self) -> None:
        self._found: Any = None
        self._private = np.random.MT19937(0)
        address = self._private.ctypes.state_address  # of its words and the index of the next one
        self._state = _memory(address, TWISTER + 1)
        # In place of a bit generator, NumPy reads and writes this with the normal number that it has in hand, and nothing else.
        self._gauss: Any = SimpleNamespace(state={})

    def lend(self, key: int) -> None:
        """Save its state and seed it with ``key``."""
        self._state[:TWISTER] = _numpy_words.of(key)
        self._state[TWISTER] = TWISTER
        self._gauss.state = {"bit_generator": "", "state": None}
        self._found = _module.get_bit_generator()
        _numpy._bit_generator = self._gauss
        _numpy.get_state(legacy=False)
        _module.set_bit_generator(self._private)

    def give_back(self) -> None:
        """Restore the saved state. A second call does nothing."""
        if self._found is None:
            return
        if "gauss" in self._gauss.state:
            _module.set_bit_generator(self._found)
            _numpy._bit_generator = self._gauss
            _numpy.set_state(self._gauss.state)
        _numpy._bit_generator = self._found
        self._found = None


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


def _state_in_memory(generator: Any) -> NDArray[np.uint32] | None:
    """(625,) index of the next word, and the words, where they lie in the object; ``None`` where they do not lie so."""
    *words, following = generator.getstate()[1]
    memory = _memory(id(generator), _random.Random.__basicsize__ // 4)
    parts = (memory[at : at + 1 + TWISTER] for at in range(len(memory) - TWISTER))
    return next((part for part in parts if np.array_equal(part, [following, *words])), None)


def _memory(address: int, words: int) -> NDArray[np.uint32]:
    """Words of 32 bits at an address."""
    there: Any = (ctypes.c_uint32 * words).from_address(address)
    return np.frombuffer(there, np.uint32)


_python: Any = vars(random)["_inst"]  # the object that the functions of the module are methods of
_python_state = _state_in_memory(_python)
_module: Any = np.random  # two functions of which annotations leave out
_numpy: Any = np.random.mtrand._rand  # as _python
_numpy_words, _python_words = KeyedWords(1), KeyedWords(2)
