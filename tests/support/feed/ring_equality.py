"""What is compared: two feeds' batches, to the bit."""

from collections import UserDict
from dataclasses import fields, is_dataclass, replace

import numpy as np
import torch
from support.comparison.values import assert_values
from support.feed.ring_inputs import without_workers

from gpuaug import StreamedLoader
from gpuaug.core.encoded import Headers
from gpuaug.core.ragged import Shapes


def bits(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def is_dense(tensor):
    """Whether values fill their memory, so that a copy has the same strides."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def assert_same_tensor(got, want, where):
    assert type(got) is type(want), where
    assert vars(got) == vars(want), where  # of boxes of torchvision's, their format
    for name in ("dtype", "shape", "layout", "device", "requires_grad", "is_leaf"):
        assert getattr(got, name) == getattr(want, name), (where, name)
    assert got.is_inference() == want.is_inference(), where
    if want.layout is torch.sparse_coo:
        assert got.is_coalesced() == want.is_coalesced(), where
        assert_values(got.coalesce().indices(), want.coalesce().indices(), about=where)
        assert_values(got.coalesce().values(), want.coalesce().values(), about=where)
    elif want.layout is torch.sparse_csr:
        for part in ("crow_indices", "col_indices", "values"):
            assert_values(getattr(got, part)(), getattr(want, part)(), about=where)
    else:
        assert_values(bits(got), bits(want), about=where)
        assert got.is_conj() == want.is_conj(), where
        assert got.is_neg() == want.is_neg(), where
        if is_dense(want) and want.numel():
            assert got.stride() == want.stride(), where


def assert_same(got, want, where="batch"):
    """The same containers, and in them the same bits."""
    if isinstance(want, torch.Tensor):
        assert_same_tensor(got, want, where)
        return
    assert type(got) is type(want), where
    if isinstance(want, np.ndarray):
        assert (got.dtype, got.shape, got.tobytes()) == (want.dtype, want.shape, want.tobytes()), where
    elif isinstance(want, dict | UserDict):
        assert list(got) == list(want), where
        for key in want:
            assert_same(got[key], want[key], f"{where}[{key!r}]")
    elif isinstance(want, tuple | list):
        assert len(got) == len(want), where
        for index, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_same(a, b, f"{where}[{index}]")
    elif isinstance(want, Shapes):
        assert (got.channels, got.layout) == (want.channels, want.layout), where
        assert_same(got.sizes, want.sizes, f"{where}.sizes")
    elif isinstance(want, Headers):
        for name in Headers.__slots__:
            assert_same(getattr(got, name), getattr(want, name), f"{where}.{name}")
    elif is_dataclass(want):
        for field in fields(want):
            assert_same(getattr(got, field.name), getattr(want, field.name), f"{where}.{field.name}")
    else:
        assert got == want, where


def passes(make, feed, epochs=1, **options):
    """All batches of some epochs, kept until the last of them has arrived; the counters; torch's generator afterwards."""
    torch.manual_seed(7)
    with StreamedLoader(make(), device="cpu", feed=feed, **options) as loader:
        found = [list(loader) for _ in range(epochs)]
        return found, replace(loader.stats()), torch.get_rng_state()


def assert_ring_is_plain(make, *, slots=True, epochs=1, depends_on_workers=False, **options):
    """Assert that both feeds give the same.

    Args:
        make: Function that returns the wrapped loader.
        slots: Whether at least one batch must come through a slot; ``None`` if it may.
        epochs: Number of epochs.
        depends_on_workers: Whether batches depend on the workers. If not, the plain feed reads without workers, to save time.
        options: Further arguments of ``StreamedLoader``.
    """
    # Workers that persist draw one seed per loader, others one per epoch, as a loader without workers does.
    persists = epochs > 1 and getattr(make(), "persistent_workers", False)
    plain_make = make if depends_on_workers or persists else without_workers(make)
    want, plain, plain_state = passes(plain_make, "plain", epochs, **{k: v for k, v in options.items() if k != "feed_bytes"})
    got, stats, state = passes(make, "ring", epochs, **options)
    assert_same(got, want, "epochs")
    assert_values(state, plain_state, about="the global generator")
    assert plain.slot_batches == 0
    count = sum(map(len, got))
    assert stats.slot_batches + stats.other_batches == stats.batches == count
    if slots is not None:
        assert (stats.slot_batches > 0) == slots, stats
    return got, stats
