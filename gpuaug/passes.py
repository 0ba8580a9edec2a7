"""A loader's batches without an end, to be measured in any form; and the loader afterwards as it was before."""

import copy
import operator
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from gpuaug.batch import Batch
from gpuaug.counters import Stats
from gpuaug.depth import Fixed
from gpuaug.errors import ArgumentError
from gpuaug.feed import Pulled, has_persistent_workers
from gpuaug.flight import Flight
from gpuaug.loader import StreamedLoader


class Passes:
    """The loader's batches without an end: in either form, or as they come from the wrapped loader."""

    def __init__(self, loader: StreamedLoader) -> None:
        self._loader = loader
        self._flight: Flight | None = None
        self._depth = Fixed(0)
        self._had_any = False

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, *exc: object) -> None:
        if self._flight is not None:
            self._flight.close()

    def next(self, depth: int) -> Batch:
        """The next batch, with ``depth`` of them ahead."""
        self._depth.now = depth
        for _ in range(2):
            flight = self._begun()
            consumer = self._loader._machinery.lanes.consumer()
            flight.catch_up(consumer)
            if flight.waiting:
                self._had_any = True
                return flight.hand_over(consumer)
            self._begin()
        raise self._no_batches()

    def pull(self) -> Pulled:
        """The next batch of the wrapped loader, as it is pulled."""
        for _ in range(2):
            if self._begun().ended:
                self._begin()  # its end was read ahead, and nothing comes after that
            feed = self._begun().feed
            pulled = feed.get(block=True)
            feed.refill()
            assert pulled is not None
            if pulled.error is not None:
                pulled.error.add_note("gpuaug: raised by the wrapped loader, while it was measured by itself.")
                raise pulled.error
            if not pulled.ended:
                return pulled
            self._begin()
        raise self._no_batches()

    def _begun(self) -> Flight:
        assert self._flight is not None
        return self._flight

    def _begin(self) -> None:
        if self._flight is not None:
            self._flight.close()
        self._flight = self._loader._begin(self._depth)

    def _no_batches(self) -> ArgumentError:
        if self._had_any:
            return read_once(self._loader.loader)
        return ArgumentError("loader must have batches to be profiled, got one without any. See whether its dataset is empty.")


@contextmanager
def left_as_it_was(loader: StreamedLoader) -> Iterator[None]:
    """Afterwards the loader's epoch, state and counters, and torch's generators, are what they were."""
    machinery, counted = loader._machinery, loader._machinery.stats
    generators = (getattr(part, "generator", None) for part in _parts(loader.loader))
    states = [(generator, generator.get_state()) for generator in generators if isinstance(generator, torch.Generator)]
    places = [(part, copy.deepcopy(part.state_dict())) for part in _in_this_process(loader.loader)]
    no_workers = has_persistent_workers(loader.loader) and not _workers_run(loader)
    machinery.stats = Stats()
    try:
        with machinery.progress.set_aside(), _generators_kept(loader.device):
            yield
    finally:
        machinery.stats = counted
        if no_workers:
            loader.close()  # what draws their seeds is whoever starts them
        for generator, state in states:
            generator.set_state(state)
        for part, place in places:
            part.load_state_dict(place)


@contextmanager
def _generators_kept(device: torch.device) -> Iterator[None]:
    """Give torch's global generators, of the host and of ``device``, their states back afterwards."""
    module = None if device.type == "cpu" else getattr(torch, device.type)
    where = (device,) if device.type in ("cuda", "xpu") else ()
    states = torch.get_rng_state(), None if module is None else module.get_rng_state(*where)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        if module is not None:
            module.set_rng_state(states[1], *where)


def read_once(source: object) -> ArgumentError:
    """What to say of a source whose batches are gone when they have been read."""
    return ArgumentError(
        f"loader must wrap what can be iterated again and again, got {type(source).__name__}, which can be read once. "
        "Wrap a list, a DataLoader, or an object whose __iter__ begins anew."
    )


def _workers_run(loader: StreamedLoader) -> bool:
    holders = loader.loader, loader._machinery.supply._twin
    return any(getattr(holder, "_iterator", None) is not None for holder in holders)


def _in_this_process(loader: Any) -> Iterator[Any]:
    """A dataset that knows its place in a stream, and is read by this process and not by copies in workers."""
    dataset = getattr(loader, "dataset", None)
    known = all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
    if known and getattr(loader, "num_workers", 0) == 0:
        yield dataset


def _parts(loader: Any) -> Iterator[Any]:
    """The wrapped loader and what it draws with."""
    for path in ("", "sampler", "batch_sampler", "batch_sampler.sampler", "dataset"):
        with suppress(AttributeError):
            yield operator.attrgetter(path)(loader) if path else loader
