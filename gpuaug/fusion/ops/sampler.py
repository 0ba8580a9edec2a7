"""Random numbers for the draws of the ops, from one counter-based generator per batch.

A *sample* is an image or a clip. A *column* is one number per sample, (B,); an op draws one column or several. A *view* is one
of several random augmentations of the same images. A *container* runs some of its ops, picked at random per sample.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class Sampler:
    """Random numbers for one batch, or for several batches in one array, with B = batches · samples per batch.

    The numbers of a batch depend on its key, its number of samples and ``columns``, not on other batches or on the machine.
    Samplers of a thread share NumPy generators, because creating a generator takes longer than drawing for a batch. So a
    sampler must not be used after its thread has created another sampler.

    Args:
        keys: Seed of each batch, in [0, 2⁶⁴).
        samples_per_batch: Number of samples per batch.
        columns: Number of columns that one call of NumPy draws in advance. The order of the drawn numbers depends on it.
        views: Index of the view that each batch belongs to. Empty if all are 0.
        separate_generators: Whether to create generators for this sampler, so that other samplers remain valid.
    """

    def __init__(
        self,
        keys: Sequence[int],
        samples_per_batch: int,
        columns: int = 8,
        views: Sequence[int] = (),
        *,
        separate_generators: bool = False,
    ) -> None:
        self.batches = len(keys)
        self.samples_per_batch = samples_per_batch
        self.samples = len(keys) * samples_per_batch
        self._views = views or (0,) * len(keys)
        self.columns_drawn = 0
        """Number of columns that ``uniform`` has returned so far."""
        self._generators = [_generator(key) for key in keys] if separate_generators else _generators(keys)
        self._columns_per_call = columns
        self._block = self._columns(columns)
        """Columns that were drawn in advance, (columns, B)."""
        self._position = 0
        """Index of the next column of ``_block`` to return."""
        self._shared: dict[object, NDArray[np.float32]] = {}
        """Results of the method ``shared``, by key."""

    def _columns(self, count: int) -> NDArray[np.float32]:
        """Draw the next uniform numbers in [0, 1) of all generators, (count, B)."""
        numbers = np.empty((self.batches, count, self.samples_per_batch), dtype=np.float32)
        for generator, numbers_of_batch in zip(self._generators, numbers, strict=True):
            generator.random(out=numbers_of_batch, dtype=np.float32)
        return numbers.transpose(1, 0, 2).reshape(count, self.samples)

    @property
    def views(self) -> NDArray[np.int64]:
        """Index of the view of each sample, (B,)."""
        return np.repeat(self._views, self.samples_per_batch)

    def uniform(self, columns: int | None = None) -> NDArray[np.float32]:
        """Draw uniform numbers in [0, 1) with 24 random bits, as ``torch.rand`` does: (B,), or (columns, B)."""
        count = 1 if columns is None else columns
        if self._position + count > len(self._block):
            self._block = self._columns(max(self._columns_per_call, count))
            self._position = 0
        numbers = self._block[self._position : self._position + count]
        self._position += count
        self.columns_drawn += count
        return numbers[0] if columns is None else numbers

    def shared(self, key: object) -> NDArray[np.float32]:
        """Return uniform numbers in [0, 1), (B,), drawn at the first call with ``key``; later calls return the same numbers."""
        numbers = self._shared.get(key)
        if numbers is None:
            numbers = self._shared[key] = self.uniform()
        return numbers

    def within(self, low: float, high: float) -> NDArray[np.float32]:
        """Draw uniform numbers in [low, high), (B,)."""
        return self.uniform() * np.float32(high - low) + np.float32(low)

    def within_bounds(self, low: NDArray[np.float32], high: NDArray[np.float32]) -> NDArray[np.float32]:
        """Draw uniform numbers, (K, B), with row k in [low[k], high[k]). ``low``, ``high``: (K, 1)."""
        numbers = self.uniform(len(low)) * (high - low)
        numbers += low
        return numbers

    def _repeated(self, numbers: Sequence[Any]) -> NDArray[np.float32]:
        """Repeat the entry of ``numbers`` for each batch, of shape () or (K,), for its samples: (B,) or (K, B)."""
        return np.repeat(np.array(numbers, dtype=np.float32), self.samples_per_batch, axis=0).T

    def beta(self, concentration: float) -> NDArray[np.float32]:
        """Draw from the beta distribution with both parameters equal to ``concentration``, (B,)."""
        if concentration == 1.0:
            return self.uniform()
        numbers = [generator.beta(concentration, concentration, self.samples_per_batch) for generator in self._generators]
        return np.concatenate(numbers).astype(np.float32)

    def dirichlet(self, concentration: float, count: int) -> NDArray[np.float32]:
        """Draw from the Dirichlet distribution with ``count`` parameters equal to ``concentration``, (count, B)."""
        parameters = [concentration] * count
        numbers = [generator.dirichlet(parameters, self.samples_per_batch) for generator in self._generators]
        return np.concatenate(numbers).T.astype(np.float32)

    def permutation(self, count: int) -> NDArray[np.int64]:
        """Draw a permutation of ``count`` indices per batch, (batches, count)."""
        return np.stack([generator.permutation(count) for generator in self._generators])

    def key(self) -> int:
        """Draw a seed in [0, 2⁶³) for another generator. Only for a sampler of one batch."""
        assert self.batches == 1, "an op that draws a key must set draws_one_batch_at_a_time"
        return int(self._generators[0].integers(0, 2**63))

    def shared_by_samples(self) -> "Sampler":
        """Return a sampler that draws one number per batch and column, and repeats it for the samples of the batch."""
        return _SharedSampler(self)


SPLITMIX_INCREMENT, SPLITMIX_MULTIPLIER_1, SPLITMIX_MULTIPLIER_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of SplitMix64."""

Words = TypeVar("Words", NDArray[np.int64], Tensor)


def extra_uniforms(numbers: NDArray[np.float32], pairs: int, start: int = 0) -> NDArray[np.float32]:
    """Generate any number of uniform numbers in [0, 1) per sample by SplitMix64, with a seed per sample.

    For ops that need more numbers for some samples than for others.

    Args:
        numbers: Drawn uniform numbers. The four numbers of a sample form its seed.
        pairs: Number of pairs per sample to return.
        start: Number of pairs per sample to skip, because earlier calls returned them.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.

    Shape:
        - numbers: (4, samples), 24 random bits each
        - returns: (2, ``pairs``, samples), 24 random bits each; the first axis is the index in the pair
    """
    words = (numbers * np.float32(2**24)).astype(np.int64)
    words = (words[::2] << 24) | words[1::2]
    seeds = splitmix64_mix(words[0]) ^ words[1]
    counters = np.arange(start + 1, start + pairs + 1)[:, None]
    bits = splitmix64_mix(seeds + counters * as_int64(SPLITMIX_INCREMENT))
    # Two uniform numbers per word: its highest and its lowest 24 bits.
    halves = np.empty((2, *bits.shape), dtype=np.float32)
    halves[0] = (bits >> 40) & (2**24 - 1)
    halves[1] = bits & (2**24 - 1)
    halves *= np.float32(2**-24)
    return halves


def splitmix64_mix(words: Words) -> Words:
    """Return the output function of SplitMix64 of 64-bit words, which are stored as int64."""
    for shift, multiplier in ((30, SPLITMIX_MULTIPLIER_1), (27, SPLITMIX_MULTIPLIER_2)):
        words = (words ^ ((words >> shift) & (2 ** (64 - shift) - 1))) * as_int64(multiplier)
    return words ^ ((words >> 31) & (2**33 - 1))


def as_int64(word: int) -> int:
    """Return the int64 number with the bits of an unsigned 64-bit word."""
    return word - 2**64 if word >= 2**63 else word


_local = threading.local()
"""NumPy generators of the current thread, which all of its samplers share."""


def _generator(key: int) -> np.random.Generator:
    """Create a generator of NumPy's Philox with this key."""
    return np.random.Generator(np.random.Philox(key=key))


def _generators(keys: Sequence[int]) -> list[np.random.Generator]:
    """Return shared generators of this thread, one per key, reset to the state of ``Generator(Philox(key=key))``."""
    generators: list[np.random.Generator] = _local.__dict__.setdefault("generators", [])
    while len(generators) < len(keys):
        generators.append(_generator(0))
    philox: dict[str, Any] = {"counter": np.zeros(4, dtype=np.uint64)}
    initial = {"bit_generator": "Philox", "state": philox, "buffer": (0,) * 4, "buffer_pos": 4, "has_uint32": 0, "uinteger": 0}
    words = np.array([(key, 0) for key in keys], dtype=np.uint64)
    for generator, philox["key"] in zip(generators, words, strict=False):  # sets the key in ``initial``, which holds ``philox``
        generator.bit_generator.state = initial
    return generators[: len(keys)]


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """Random choice of a container: one uniform number in [0, 1) per sample, which all ops of the container share.

    The boundaries ``ends`` divide [0, 1) into bins. The *outcome* of a sample is the index of the bin with its number.
    """

    ends: tuple[float, ...]
    """Boundaries between the bins, ascending."""


@dataclass(frozen=True, slots=True, eq=False)
class Gate:
    """Condition for an op of a container: the outcomes of the container's random choice with which the op runs."""

    draw: Draw
    outcomes: NDArray[np.bool_]
    """For each outcome, whether the op runs, (number of outcomes,)."""

    def applies(self, sampler: Sampler) -> NDArray[np.bool_]:
        """Return the mask of the samples that the op runs for, (B,) bool."""
        mask: NDArray[np.bool_] = self.outcomes[np.searchsorted(self.draw.ends, sampler.shared(self.draw), side="right")]
        return mask


class ArraySampler(Sampler):
    """Sampler whose ``uniform`` returns the numbers of an array, which another sampler has drawn for one op.

    Args:
        numbers: Uniform numbers in [0, 1), (columns, B), in the order in which the op draws them.
    """

    def __init__(self, numbers: NDArray[np.float32]) -> None:
        self.batches = 1
        self.samples_per_batch = numbers.shape[1]
        self.samples = numbers.shape[1]
        self.columns_drawn = 0
        self._block = numbers
        self._position = 0


class _SharedSampler(Sampler):
    """Sampler that draws one number per batch, and repeats it for all samples. It shares the generators of ``sampler``."""

    def __init__(self, sampler: Sampler) -> None:
        self.batches, self.samples_per_batch, self.samples = sampler.batches, sampler.samples_per_batch, sampler.samples
        self._generators = sampler._generators

    def uniform(self, columns: int | None = None) -> NDArray[np.float32]:
        shape = () if columns is None else (columns,)
        return self._repeated([generator.random(shape, dtype=np.float32) for generator in self._generators])

    def beta(self, concentration: float) -> NDArray[np.float32]:
        return self._repeated([generator.beta(concentration, concentration) for generator in self._generators])

    def shared_by_samples(self) -> Sampler:
        return self
