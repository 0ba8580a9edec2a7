"""Global random generators of Python, NumPy and devices, seeded for the duration of a stage and then restored.

The seed for one stage and one batch is called *key*: an integer in [0, 2⁶³) that depends on seed, epoch, rank, batch and stage.
"""

import pickle
import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch


class GlobalGenerator(NamedTuple):
    """A global random generator, as two functions."""

    save: Callable[[], Callable[[], object]]
    """Return a function that restores the current state, and may be called several times."""
    seed: Callable[[int], object]
    """Seed the generator with a key. Call ``save`` before."""


def python_generator() -> GlobalGenerator:
    """Return Python's global generator, from which the module ``random`` draws."""
    return GlobalGenerator(lambda: partial(random.setstate, random.getstate()), random.seed)


def numpy_generator() -> GlobalGenerator:
    """Return NumPy's global generator, from which the functions of ``numpy.random`` draw.

    For a stage, it is replaced by a private generator: setting its state would take longer, and the user's generator may be one
    that cannot be seeded.
    """
    private = np.random.MT19937(0)

    def save() -> Callable[[], None]:
        generator, state = _numpy_random.get_bit_generator(), _numpy_random.get_state(legacy=False)

        def restore() -> None:
            _numpy_random.set_bit_generator(generator)
            if state["has_gauss"]:  # a normally distributed number for the next draw, which is not part of the bit generator
                _numpy_random.set_state(state)

        return restore

    def seed(key: int) -> None:
        _numpy_random.set_bit_generator(private)
        _numpy_random.seed((key % 2**32, key >> 32, _NUMPY_SEED_PART))

    return GlobalGenerator(save, seed)


def host_states() -> tuple[Any, ...]:
    """Return the states of the global generators of torch on the host, NumPy and Python. A draw changes them."""
    torch_state = torch.default_generator.get_state().numpy().tobytes()
    return torch_state, pickle.dumps(_numpy_random.get_state(legacy=False)), random.getstate()


def device_generator(device: torch.device) -> GlobalGenerator | None:
    """Return the global generator of an accelerator; ``None`` for the CPU.

    On a CUDA device, the state object of the generator is replaced, and its values stay unchanged. So a CUDA graph that is
    captured within the stage uses the private state: replays draw from the private state, and a failed capture does not change
    the state from which the user draws. On other accelerators the state is copied.
    """
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        module: Any = torch.get_device_module(device)
        return GlobalGenerator(lambda: partial(module.set_rng_state, module.get_rng_state()), module.manual_seed)
    torch.cuda.init()  # creates the default generators
    generator = torch.cuda.default_generators[device.index]
    private = torch.Generator(torch.device("cuda", device.index))

    def seed(key: int) -> None:
        private.manual_seed(key)
        generator.graphsafe_set_state(private)

    return GlobalGenerator(lambda: partial(generator.graphsafe_set_state, generator.graphsafe_get_state()), seed)


_numpy_random: Any = np.random  # Any: its annotations lack get_bit_generator and set_bit_generator
_NUMPY_SEED_PART = 1  # in NumPy's seed only: Python's generator has the same algorithm, and must not draw the same numbers
