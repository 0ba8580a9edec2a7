"""A loader that was shown is as it was, and what was shown is what comes next."""

import pytest
import torch
from support.profiler.viewer import Squares, channels_first, pixels, texts
from torch.utils.data import DataLoader

import gpuaug
from gpuaug import ArgumentError, StreamedLoader


def shuffled():
    return DataLoader(Squares(), 2, shuffle=True)


def bits(batches):
    return [[part.tolist() if isinstance(part, torch.Tensor) else part for part in batch] for batch in batches]


def noisy(images):
    return images / 512 + torch.rand_like(images, dtype=torch.float32) / 2


def outcome(*, shows):
    """The batches of two epochs, what is drawn after them, and the figure that is drawn before them."""
    torch.manual_seed(3)
    with StreamedLoader(shuffled(), [noisy], device="cpu", seed=1) as loader:
        figure = gpuaug.show(loader, n=1) if shows else None
        return [bits(loader), bits(loader)], torch.rand(3).tolist(), figure


def test_later_batches_are_unchanged():
    """The profiler's tests have other loaders and moments, for the same context."""
    batches, then, _ = outcome(shows=False)
    shown, shown_then, figure = outcome(shows=True)
    assert (shown, shown_then) == (batches, then)
    images = torch.tensor(batches[0][0][0])[:1]
    got = [channels_first(each) for each in pixels(figure)[len(images) :]]
    assert torch.equal(torch.stack(got), images)
    assert "in batch 0 of epoch 0," in texts(figure)[0]


def fail(images):
    raise KeyError("mine")


@pytest.mark.parametrize(("stage", "error"), [(lambda images: images[:1], ArgumentError), (fail, KeyError)])
def test_loader_is_unchanged_after_a_failure(stage, error):
    loader = StreamedLoader(shuffled(), [stage], device="cpu")
    state = torch.get_rng_state()
    loader.set_epoch(4)
    with pytest.raises(error):
        gpuaug.show(loader)
    assert torch.equal(torch.get_rng_state(), state)
    loader.stages = []
    assert texts(gpuaug.show(loader))[0].endswith("of epoch 4")
