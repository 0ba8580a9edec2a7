"""Random numbers of draws: one counter-based generator per batch, which supplies columns of uniform numbers."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from kornia.augmentation import random_generator
from numpy.typing import NDArray

from gpuaug.core.torchvision_types import class_of, names_used

_TRUE_MASKS: dict[int, NDArray[np.bool_]] = {}
"""Cache of ``always``, by batch size."""


class Sampler:
    """Uniform numbers for one batch or several batches. They depend on the keys only, not on the machine.

    Several batches are concatenated; the numbers of a batch do not depend on the others. A sampler becomes invalid when the
    same thread constructs another, because both share NumPy generators: creating a generator takes longer than drawing a batch.
    Pass ``apart=True`` for separate generators.

    Args:
        keys: One integer in [0, 2⁶⁴) per batch.
        each: Number of samples per batch.
        columns: Number of columns per call of NumPy, to share the overhead of a call. The numbers depend on it.
        apart: True for separate generators, so that other samplers of the thread stay valid.
    """

    def __init__(self, keys: Sequence[int], each: int, columns: int = 8, *, apart: bool = False) -> None:
        self.batches = len(keys)
        self.each = each
        self.batch = len(keys) * each
        self.used = 0
        self._generators = [_generator(key) for key in keys] if apart else _generators(keys)
        self._columns_per_call = columns
        self._block = self._first_columns(columns)
        self._taken = 0
        self._shared: dict[object, NDArray[np.float32]] = {}

    def _first_columns(self, count: int) -> NDArray[np.float32]:
        """Same as ``_columns``, for generators that have not drawn yet, from the raw 64-bit words of Philox."""
        if self.batches == 1 or count * self.each % 2:
            return self._columns(count)
        words = np.empty((self.batches, count * self.each // 2), dtype="<u8")
        for generator, row in zip(self._generators, words, strict=True):
            row[:] = generator.bit_generator.random_raw(len(row))
        # As ``Generator.random``, but faster: a number is the upper 24 bits of half a word, the lower half first.
        bits = words.view("<u4")
        bits >>= 8
        numbers = np.empty((count, self.batches, self.each), dtype=np.float32)
        numbers[:] = bits.view("<i4").reshape(self.batches, count, self.each).transpose(1, 0, 2)
        numbers *= np.float32(2**-24)
        return numbers.reshape(count, self.batch)

    def _columns(self, count: int) -> NDArray[np.float32]:
        if self.batches == 1:
            return self._generators[0].random((count, self.each), dtype=np.float32)
        numbers = np.empty((self.batches, count, self.each), dtype=np.float32)
        for generator, row in zip(self._generators, numbers, strict=True):
            generator.random(out=row, dtype=np.float32)
        return numbers.transpose(1, 0, 2).reshape(count, self.batch)

    def uniform(self, columns: int | None = None) -> NDArray[np.float32]:
        """Uniform numbers in [0, 1) with 24 random bits, like ``torch.rand``: (B,), or (columns, B)."""
        count = 1 if columns is None else columns
        if self._taken + count > len(self._block):
            self._block = self._columns(max(self._columns_per_call, count))
            self._taken = 0
        numbers = self._block[self._taken : self._taken + count]
        self._taken += count
        self.used += count
        return numbers[0] if columns is None else numbers

    def shared(self, key: object) -> NDArray[np.float32]:
        """Uniform numbers in [0, 1), (B,), drawn on the first call per ``key`` and then reused."""
        numbers = self._shared.get(key)
        if numbers is None:
            numbers = self._shared[key] = self.uniform()
        return numbers

    def within(self, low: float, high: float) -> NDArray[np.float32]:
        """Uniform numbers in [low, high), (B,)."""
        return self.uniform() * np.float32(high - low) + np.float32(low)

    def between(self, low: NDArray[np.float32], high: NDArray[np.float32]) -> NDArray[np.float32]:
        """Uniform numbers in [low, high), (K, B), for bounds (K, 1)."""
        numbers = self.uniform(len(low)) * (high - low)
        numbers += low
        return numbers

    def number(self) -> NDArray[np.float32]:
        """One uniform number in [0, 1) per batch, repeated for its samples: (B,)."""
        return self._repeated([generator.random(dtype=np.float32) for generator in self._generators])

    def _repeated(self, numbers: Sequence[Any]) -> NDArray[np.float32]:
        return np.repeat(np.array(numbers, dtype=np.float32), self.each, axis=0).T

    def beta(self, concentration: float) -> NDArray[np.float32]:
        """Numbers from the symmetric beta distribution, (B,)."""
        if concentration == 1.0:
            return self.uniform()
        numbers = [generator.beta(concentration, concentration, self.each) for generator in self._generators]
        return np.concatenate(numbers).astype(np.float32)

    def permutation(self, count: int) -> NDArray[np.int64]:
        """Random permutation of ``count`` indices per batch, (batches, count)."""
        if count > 16:
            return np.stack([generator.permutation(count) for generator in self._generators])
        # Shuffling a short list gives the same result as ``permutation`` in a third of the time.
        orders = [list(range(count)) for _ in self._generators]
        for generator, order in zip(self._generators, orders, strict=True):
            generator.shuffle(order)
        return np.array(orders, dtype=np.int64).reshape(self.batches, count)

    def integer(self, low: int, high: int) -> int:
        """One integer in [low, high), shared by the batch. Only for a sampler of one batch."""
        return int(self._only_generator.integers(low, high))

    def key(self) -> int:
        """Seed for another generator, in [0, 2⁶³), shared by the batch. Only for a sampler of one batch."""
        return int(self._only_generator.integers(0, 2**63))

    @property
    def _only_generator(self) -> np.random.Generator:
        assert self.batches == 1, "an op that takes a number for a whole batch must say that it draws alone"
        return self._generators[0]

    def same(self) -> "Sampler":
        """Return a sampler whose numbers are shared by all samples of a batch."""
        return _SharedSampler(self)


def always(batch: int) -> NDArray[np.bool_]:
    """Read-only apply mask that is True for all samples, (B,)."""
    mask = _TRUE_MASKS.get(batch)
    if mask is None:
        mask = np.ones(batch, dtype=bool)
        mask.flags.writeable = False
        if len(_TRUE_MASKS) > 64:
            _TRUE_MASKS.clear()
        _TRUE_MASKS[batch] = mask
    return mask


INCREMENT, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of SplitMix64."""


def extra_uniforms(numbers: NDArray[np.float32], pairs: int, used: int = 0) -> NDArray[np.float32]:
    """Extra uniform numbers in [0, 1) per sample, from SplitMix64 seeded by drawn numbers of the sample.

    Args:
        numbers: Drawn uniform numbers that form the seeds.
        pairs: Number of pairs to return.
        used: Number of pairs to skip, returned by earlier calls.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.

    Shape:
        - numbers: (4, samples), 24 random bits each
        - returns: (2, ``pairs``, samples), 24 random bits each
    """
    words = (numbers * np.float32(2**24)).astype(np.uint64)
    words = words[::2] << np.uint64(24) | words[1::2]
    seeds = _splitmix64_mix(words[0]) ^ words[1]
    steps = np.arange(used + 1, used + pairs + 1, dtype=np.uint64)[:, None]
    bits = _splitmix64_mix(seeds + steps * np.uint64(INCREMENT))
    halves = np.empty((2, *bits.shape), dtype=np.float32)
    halves[0] = bits >> np.uint64(40)
    halves[1] = bits & np.uint64(2**24 - 1)
    halves *= np.float32(2**-24)
    return halves


def _splitmix64_mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Output function of SplitMix64, applied to 64-bit words."""
    words = words ^ (words >> np.uint64(30))
    words *= np.uint64(FIRST)
    words ^= words >> np.uint64(27)
    words *= np.uint64(SECOND)
    words ^= words >> np.uint64(31)
    return words


_local = threading.local()


def _generator(key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=key))


def _generators(keys: Sequence[int]) -> list[np.random.Generator]:
    """Generators of this thread, reset to the state of ``Generator(Philox(key=key))``."""
    generators: list[np.random.Generator] = _local.__dict__.setdefault("generators", [])
    while len(generators) < len(keys):
        generators.append(_generator(0))
    philox: dict[str, Any] = {"counter": np.zeros(4, dtype=np.uint64)}
    initial = {"bit_generator": "Philox", "state": philox, "buffer": (0,) * 4, "buffer_pos": 4, "has_uint32": 0, "uinteger": 0}
    words = np.array([(key, 0) for key in keys], dtype=np.uint64)
    for generator, philox["key"] in zip(generators, words, strict=False):
        generator.bit_generator.state = initial
    return generators[: len(keys)]


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """One uniform number in [0, 1) per sample, shared by all ops of a container with a random choice.

    ``ends`` are ascending bin edges. The outcome is the index of the bin that the number falls into.
    """

    ends: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Gate:
    """Condition under which an op of a container runs, by the outcome of the container's draw."""

    draw: Draw
    outcomes: NDArray[np.bool_]
    """``outcomes[i]``: True if the op runs when the draw falls into bin ``i``. Length ``len(draw.ends) + 1``."""

    def applies(self, sampler: Sampler) -> NDArray[np.bool_]:
        """Mask of the samples that the op runs for, (B,) bool."""
        mask: NDArray[np.bool_] = self.outcomes[np.searchsorted(self.draw.ends, sampler.shared(self.draw), side="right")]
        return mask


class GivenUniforms(Sampler):
    """Sampler that returns given numbers, drawn by another sampler, to one op.

    Args:
        numbers: Uniform numbers in [0, 1) that the op draws, (columns, B).
    """

    def __init__(self, numbers: NDArray[np.float32]) -> None:
        self.batches = 1
        self.each = numbers.shape[1]
        self.batch = numbers.shape[1]
        self.used = 0
        self._block = numbers
        self._taken = 0


class _SharedSampler(Sampler):
    def __init__(self, sampler: Sampler) -> None:
        self.batches, self.each, self.batch = sampler.batches, sampler.each, sampler.batch
        self._generators = sampler._generators

    def uniform(self, columns: int | None = None) -> NDArray[np.float32]:
        shape = () if columns is None else (columns,)
        return self._repeated([generator.random(shape, dtype=np.float32) for generator in self._generators])

    def beta(self, concentration: float) -> NDArray[np.float32]:
        return self._repeated([generator.beta(concentration, concentration) for generator in self._generators])

    def same(self) -> Sampler:
        return self


def foreign_generator(module: Any, base: type) -> str | None:
    """Reason why ``module``, an instance of Kornia's ``base``, may draw from another distribution, or ``None``."""
    generator = module._param_generator if "_param_generator" in names_used(base) else None
    classes = [getattr(random_generator, name) for name in names_used(base) if hasattr(random_generator, name)]
    if generator is None or class_of(generator, classes) is not None:
        return None
    return f"its _param_generator, {type(generator).__name__}, is not that of {base.__name__}"
