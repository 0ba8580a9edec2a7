"""Global random generators of Python, NumPy and devices, seeded for the duration of a stage and then restored.

The seed for one stage and one batch is called *key*: an integer that depends on seed, epoch, rank, batch and stage.

The generators of Python and NumPy are Mersenne Twisters: the state is 624 words and the index of the next word. Saving, seeding
and restoring them with functions of Python and NumPy would take 200 µs, longer than many stages. So NumPy's generator is
replaced by a private generator, and the state of Python's generator is read and written in memory.
"""

import _random
import ctypes
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

TWISTER = 624  # 32-bit words of a Mersenne Twister's state


class KeyedWords:
    """States of a Mersenne Twister that depend on all bits of a key in [0, 2⁶³).

    Word ``i`` is the upper half of ``weight[i] * (2 * key + 1)`` modulo 2⁶⁴.

    Args:
        number: Seed of the weights. With the same key, generators with different weights draw different random numbers.
    """

    def __init__(self, number: int) -> None:
        self._weights = np.frombuffer(random.Random(number).randbytes(8 * TWISTER), "<u8")
        self._products = np.empty(TWISTER, "<u8")
        self._words = self._products.view("<u4")[1::2]

    def words_of(self, key: int) -> NDArray[np.uint32]:
        """Return the (624,) words of the state for a key. The next call overwrites the array."""
        np.multiply(self._weights, 2 * key + 1, out=self._products)
        return self._words


class PythonGenerator:
    """Python's global generator, from which the module ``random`` draws."""

    def __init__(self) -> None:
        self._saved: Any = None
        self._saved_words = np.empty(1 + TWISTER, np.uint32)

    def save_and_seed(self, key: int) -> None:
        """Save the state of the generator and seed it with ``key``."""
        if _python_state is None:
            self._saved = _python_generator.getstate()
            _python_generator.seed(key)
            return
        self._saved_words[:] = _python_state
        self._saved = (_python_generator.gauss_next,)
        _python_generator.gauss_next = None
        _python_state[1:] = _python_words.words_of(key)
        _python_state[0] = TWISTER  # index of the next word: at the end, so that the generator first mixes the words

    def restore(self) -> None:
        """Restore the saved state. A second call does nothing."""
        if self._saved is None:
            return
        if _python_state is None:
            _python_generator.setstate(self._saved)
        else:
            _python_state[:] = self._saved_words
            (_python_generator.gauss_next,) = self._saved
        self._saved = None


class NumpyGenerator:
    """NumPy's global generator, from which the functions of ``numpy.random`` draw."""

    def __init__(self) -> None:
        self._saved: Any = None
        self._private = np.random.MT19937(0)
        address = self._private.ctypes.state_address  # address of the words, followed by the index of the next word
        self._state = _memory(address, TWISTER + 1)
        # NumPy caches one normally distributed number. With this object in place of the bit generator, get_state and set_state
        # read and write only the cached number.
        self._cached_normal: Any = SimpleNamespace(state={})

    def save_and_seed(self, key: int) -> None:
        """Save the state of the generator and seed it with ``key``."""
        self._state[:TWISTER] = _numpy_words.words_of(key)
        self._state[TWISTER] = TWISTER
        self._cached_normal.state = {"bit_generator": "", "state": None}
        self._saved = _numpy_random.get_bit_generator()
        _numpy_generator._bit_generator = self._cached_normal
        _numpy_generator.get_state(legacy=False)
        _numpy_random.set_bit_generator(self._private)

    def restore(self) -> None:
        """Restore the saved state. A second call does nothing."""
        if self._saved is None:
            return
        if "gauss" in self._cached_normal.state:
            _numpy_random.set_bit_generator(self._saved)
            _numpy_generator._bit_generator = self._cached_normal
            _numpy_generator.set_state(self._cached_normal.state)
        _numpy_generator._bit_generator = self._saved
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


def _state_in_memory(generator: Any) -> NDArray[np.uint32] | None:
    """Return a (625,) view of a generator's state in memory: index of the next word, then the words; ``None`` if not found."""
    *words, next_index = generator.getstate()[1]
    memory = _memory(id(generator), _random.Random.__basicsize__ // 4)
    parts = (memory[offset : offset + 1 + TWISTER] for offset in range(len(memory) - TWISTER))
    return next((part for part in parts if np.array_equal(part, [next_index, *words])), None)


def _memory(address: int, words: int) -> NDArray[np.uint32]:
    """Return a (words,) view of the memory at an address."""
    buffer: Any = (ctypes.c_uint32 * words).from_address(address)
    return np.frombuffer(buffer, np.uint32)


_python_generator: Any = vars(random)["_inst"]  # the functions of the module are methods of this object
_python_state = _state_in_memory(_python_generator)
_numpy_random: Any = np.random  # Any: its annotations lack get_bit_generator and set_bit_generator
_numpy_generator: Any = np.random.mtrand._rand  # the functions of numpy.random are methods of this object
_numpy_words, _python_words = KeyedWords(1), KeyedWords(2)
