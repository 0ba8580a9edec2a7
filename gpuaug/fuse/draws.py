"""Where draws come from: one counter-based generator for a batch, and uniform numbers taken from it a column at a time."""

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

_OPEN: dict[int, NDArray[np.bool_]] = {}


class Source:
    """Uniform numbers for one batch, the same on every machine for one key.

    Sources of one thread share a generator, since to make one takes longer than to draw a batch. So a source ends where the
    thread makes the next.

    Args:
        key: Any integer in [0, 2⁶⁴).
        batch: How many samples a column is for.
    """

    _COLUMNS = 12
    """As many are drawn at once: a call of NumPy costs as much as some columns."""

    def __init__(self, key: int, batch: int) -> None:
        self.batch = batch
        self._generator = _generator(key)
        self._block = self._generator.random((self._COLUMNS, batch), dtype=np.float32)
        self._taken = 0

    def uniform(self, columns: int | None = None) -> NDArray[np.float32]:
        """Numbers in [0, 1) with 24 random bits, as ``torch.rand`` gives: (B,), or (columns, B)."""
        wanted = 1 if columns is None else columns
        if self._taken + wanted > len(self._block):
            fresh = self._generator.random((max(self._COLUMNS, wanted), self.batch), dtype=np.float32)
            self._block, self._taken = fresh, 0
        taken = self._block[self._taken : self._taken + wanted]
        self._taken += wanted
        return taken[0] if columns is None else taken

    def several(self, columns: int, samples: int) -> NDArray[np.float32]:
        """Numbers in [0, 1) for some of the samples, (columns, samples)."""
        return self._generator.random((columns, samples), dtype=np.float32)

    def within(self, low: float, high: float) -> NDArray[np.float32]:
        """Numbers in [low, high), (B,)."""
        return self.uniform() * np.float32(high - low) + np.float32(low)

    def between(self, low: NDArray[np.float32], high: NDArray[np.float32]) -> NDArray[np.float32]:
        """Numbers in [low, high), (K, B), for bounds of K columns, (K, 1)."""
        return self.uniform(len(low)) * (high - low) + low

    def number(self) -> float:
        """One number in [0, 1) for the whole batch."""
        return float(self._generator.random(dtype=np.float32))

    def beta(self, concentration: float) -> NDArray[np.float32]:
        """Numbers from the symmetric beta distribution, (B,)."""
        if concentration == 1.0:
            return self.uniform()
        return self._generator.beta(concentration, concentration, self.batch).astype(np.float32)

    def permutation(self, count: int) -> NDArray[np.int64]:
        """A random order of ``count`` things, for the whole batch."""
        return self._generator.permutation(count)

    def integer(self, low: int, high: int) -> int:
        """One whole number in [low, high), for the whole batch."""
        return int(self._generator.integers(low, high))

    def key(self) -> int:
        """A seed for another generator, in [0, 2³¹)."""
        return int(self._generator.integers(0, 2**31))

    def same(self) -> "Source":
        """The same source for draws that all samples share: one number, repeated."""
        return _Shared(self)


def open_gate(batch: int) -> NDArray[np.bool_]:
    """A gate that is open for all samples; not to be written to."""
    found = _OPEN.get(batch)
    if found is None:
        found = np.ones(batch, dtype=bool)
        found.flags.writeable = False
        if len(_OPEN) > 64:
            _OPEN.clear()
        _OPEN[batch] = found
    return found


_local = threading.local()
_NO_WORDS = np.zeros(4, dtype=np.uint64)


def _generator(key: int) -> np.random.Generator:
    """This thread's generator, as ``Generator(Philox(key=key))`` would be."""
    generator: np.random.Generator | None = getattr(_local, "generator", None)
    if generator is None:
        generator = _local.generator = np.random.Generator(np.random.Philox(key=0))
    state: dict[str, Any] = {
        "bit_generator": "Philox",
        "state": {"counter": _NO_WORDS, "key": np.array((key, 0), dtype=np.uint64)},
        "buffer": _NO_WORDS,
        "buffer_pos": 4,
        "has_uint32": 0,
        "uinteger": 0,
    }
    generator.bit_generator.state = state
    return generator


class _Shared(Source):
    def __init__(self, source: Source) -> None:
        self.batch = source.batch
        self._generator = source._generator

    def uniform(self, columns: int | None = None) -> NDArray[np.float32]:
        shape = (1,) if columns is None else (columns, 1)
        return np.repeat(self._generator.random(shape, dtype=np.float32), self.batch, axis=-1)

    def several(self, columns: int, samples: int) -> NDArray[np.float32]:
        return np.repeat(self._generator.random((columns, 1), dtype=np.float32), samples, axis=-1)

    def beta(self, concentration: float) -> NDArray[np.float32]:
        return np.repeat(self._generator.beta(concentration, concentration, 1).astype(np.float32), self.batch)

    def same(self) -> Source:
        return self
