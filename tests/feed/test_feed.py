"""What is said: of a ring that cannot be, of settings that there are not, and by the loader of itself."""

import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from support import internals
from support.feed.feed_iterators import take
from support.feed.ring_inputs import Samples, Source, made, with_workers
from torch.utils.data import DataLoader

from gpuaug import ArgumentError, StreamedLoader
from gpuaug.core.streams import Lane
from gpuaug.feed.feed import Feed
from gpuaug.feed.ring import default_budget_bytes

# What a finaliser raises nobody else hears of.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


class Reused(DataLoader):
    """Starts one iterator for all epochs when it is created."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.batches = super().__iter__()

    def __len__(self):
        return len(self.dataset)

    def __iter__(self):
        return (next(self.batches) for _ in range(len(self)))


def running():
    wrapped = with_workers(Samples(), persistent_workers=True, num_workers=1)()
    next(iter(wrapped))
    return wrapped


REFUSED = {
    "list": (lambda: [torch.ones(1)], "the batches of a list are in memory already"),
    "tuple": (lambda: (torch.ones(1),), "the batches of a list are in memory already"),
    "page-locked here": (lambda: DataLoader(Samples(), pin_memory=True), "the loader page-locks its batches itself"),
    "running": (running, "the loader's workers are running already"),
    "running, for all epochs": (
        lambda: Reused(Samples(), num_workers=1, sampler=[*range(25)] * 3),
        "the loader's workers are running already",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_feed_ring_refuses_unsuitable_sources_with_reason(case):
    make, why = REFUSED[case]
    wrapped = make()
    with pytest.raises(ArgumentError) as caught:
        StreamedLoader(wrapped, device="cpu", feed="ring")
    assert f"feed must be 'auto' or 'plain' here, got 'ring', but {why}" in str(caught.value)
    for feed in ("auto", "plain"):
        loader = StreamedLoader(wrapped, device="cpu", feed=feed)
        assert len(list(loader)) == len(loader)
        assert loader.stats().slot_batches == 0
        loader.close()
    if isinstance(wrapped, Reused):
        del wrapped.batches  # of an iterator that becomes garbage, workers are waited for in vain


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("platform", "device", "reason"),
    [
        ("linux", "mps", "the device is mps"),
        ("linux", "xpu", "the device is xpu"),
        ("darwin", "cuda:0", "the ring needs Linux"),
    ],
)
def test_feed_is_plain_on_other_devices_and_platforms(monkeypatch, workers, platform, device, reason):
    monkeypatch.setattr(sys, "platform", platform)
    wrapped = DataLoader(Samples(), num_workers=workers)
    assert repr(Feed(wrapped, "auto", None, torch.device(device))) == f"plain ({reason})"
    with pytest.raises(ArgumentError, match=reason):
        Feed(wrapped, "ring", None, torch.device(device))


def test_repr_names_the_feed_and_why():
    def said(loader, feed):
        text = repr(StreamedLoader(loader, device="cpu", feed=feed))
        return text[text.index("feed=") : -1]

    wrapped = with_workers(Samples())()
    assert said(wrapped, "auto") == "feed=plain (the device is cpu)"
    assert said(wrapped, "plain") == "feed=plain (as asked)"
    slots = f"(no slots yet, at most {default_budget_bytes() / 1e6:.1f} MB)"
    assert said(wrapped, "ring") == f"feed=ring {slots}"
    assert said(Source(torch.tensor), "auto") == "feed=plain (the device is cpu)"
    assert said(Source(torch.tensor), "ring") == f"feed=staged {slots}"
    assert said([], "plain") == "feed=plain (as asked)"


@pytest.mark.parametrize("workers", [0, 2])
def test_repr_says_how_many_slots_there_are_and_how_large(workers):
    batches = made(lambda i: torch.full((300_000,), i, dtype=torch.uint8), num_workers=workers)()
    with StreamedLoader(batches, device="cpu", feed="ring", feed_bytes=100_000_000) as loader:
        list(loader)
        each = internals.ring(loader).memory.newest_generation()[3]
        assert f" ({each * max(workers, 1)} slots of 0.3 MB, at most 100.0 MB)" in repr(loader)
        assert each > 2


def test_prepare_alone_page_locks_slots(monkeypatch):
    # Not the thread that pulls: a CUDA call there would end a graph capture of the user's.
    callers, sizes = [], []

    def register(address, size, flags):
        callers.append(threading.current_thread())
        sizes.append(size)
        return 0

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda _: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    feed = Feed(DataLoader(Samples(), num_workers=1), "ring", None, torch.device("cuda", 0))
    source = feed.open(lambda: None, 2)
    while not (pulled := take(source)).ended:
        feed.prepare(pulled)
        assert feed.pinned_bytes == sum(sizes)
        feed.free_after(pulled, Lane("copy").record_event())
        feed.free_read_slots()
    source.close()
    assert feed.pinned_bytes
    feed.close()
    assert feed.pinned_bytes == 0
    assert set(callers) == {threading.current_thread()}
