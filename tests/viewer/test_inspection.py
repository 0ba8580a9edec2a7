"""A loader that was shown is as it was, and what was shown is what comes next."""

import pytest
import torch
from support.process import processes
from support.profiler.viewer import Squares, channels_first, pixels, texts
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import gpuaug
from gpuaug import ArgumentError, StreamedLoader


def drawing():
    return torch.Generator().manual_seed(5)


class Drawn(Squares):
    """Its workers draw, from a seed that the loader draws for them."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image.float() / 512 + torch.rand(3, 1, 1) / 2, label


PERSISTENT = {"num_workers": 1, "persistent_workers": True}
KINDS = {
    "a list": lambda: [(torch.rand(2, 3, 4, 4, generator=drawing()), index) for index in range(6)],
    "torch's generator": lambda: DataLoader(Squares(), 2, shuffle=True),
    "workers that persist and draw": lambda: DataLoader(Drawn(), 2, shuffle=True, **PERSISTENT),
    "a state": lambda: StatefulDataLoader(Squares(), 2, shuffle=True, generator=drawing()),
}


def bits(batches):
    return [[part.tolist() if isinstance(part, torch.Tensor) else part for part in batch] for batch in batches]


def noisy(images):
    return images / 512 + torch.rand_like(images, dtype=torch.float32) / 2


def outcome(make, *, shows):
    """The batches of two epochs, what is drawn after them, and the figure that is drawn before them."""
    torch.manual_seed(3)
    with StreamedLoader(make(), [noisy], device="cpu", seed=1) as loader:
        figure = gpuaug.show(loader, n=1) if shows else None
        return [bits(loader), bits(loader)], torch.rand(3).tolist(), figure


@pytest.mark.parametrize("kind", KINDS)
def test_later_batches_are_unchanged(kind):  # the profiler's tests have more loaders and moments, for the same context
    batches, then, _ = outcome(KINDS[kind], shows=False)
    shown, shown_then, figure = outcome(KINDS[kind], shows=True)
    assert (shown, shown_then) == (batches, then)
    images = torch.tensor(batches[0][0][0])[:1]
    got = [channels_first(each) for each in pixels(figure)[len(images) :]]
    assert torch.equal(torch.stack(got), images)
    assert "in batch 0 of epoch 0," in texts(figure)[0]
    processes.assert_no_workers_or_feeds()


def test_open_iterator_on_persistent_workers_is_refused_and_goes_on():
    with StreamedLoader(DataLoader(Squares(), 2, **PERSISTENT), device="cpu") as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(ArgumentError) as caught:
            gpuaug.show(loader)
        assert (
            "loader must have no iterator open on persistent workers while it is shown, got an open one, which would end"
            in str(caught.value)
        )
        assert len(list(iterator)) == 5
        gpuaug.show(loader)


def test_loader_is_unchanged_after_a_failure():
    loader = StreamedLoader(KINDS["torch's generator"](), [lambda images: images[:1]], device="cpu")
    state = torch.get_rng_state()
    loader.set_epoch(4)
    with pytest.raises(ArgumentError):
        gpuaug.show(loader)
    assert torch.equal(torch.get_rng_state(), state)
    loader.stages = []
    assert texts(gpuaug.show(loader))[0].endswith("of epoch 4")
