"""A loader that was shown is as it was, and what was shown is what comes next."""

import pytest
import torch
from support.process import processes
from support.profiler.viewer import Squares, channels_first, pixels, texts
from torch.utils.data import DataLoader, RandomSampler
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


KINDS = {
    "a list": lambda: [(torch.rand(2, 3, 4, 4, generator=drawing()), index) for index in range(6)],
    "torch's generator": lambda: DataLoader(Squares(), 2, shuffle=True),
    "its own generator": lambda: DataLoader(Squares(), 2, shuffle=True, generator=drawing()),
    "its sampler's": lambda: DataLoader(Squares(), 2, sampler=RandomSampler(Squares(), generator=drawing())),
    "workers that draw": lambda: DataLoader(Drawn(), 2, shuffle=True, num_workers=1),
    "workers that persist": lambda: DataLoader(Squares(), 2, shuffle=True, num_workers=1, persistent_workers=True),
    "workers that persist and draw": lambda: DataLoader(Drawn(), 2, shuffle=True, num_workers=1, persistent_workers=True),
    "a state": lambda: StatefulDataLoader(Squares(), 2, shuffle=True, generator=drawing()),
}


def bits(batches):
    return [[part.tolist() if isinstance(part, torch.Tensor) else part for part in batch] for batch in batches]


def noisy(images):
    return images / 512 + torch.rand_like(images, dtype=torch.float32) / 2


def fresh(loader, show):
    show()
    return [bits(loader) for _ in range(2)]


def between(loader, show):
    first = bits(loader)
    show()
    return [first, bits(loader)]


def chosen(loader, show):
    loader.set_epoch(5)
    show()
    return [bits(loader) for _ in range(2)]


def middle(loader, show):
    iterator = iter(loader)
    first = bits([next(iterator) for _ in range(2)])
    show()
    return [first, bits(iterator), bits(loader)]


def loaded(loader, show):
    iterator = iter(loader)
    first = bits([next(iterator) for _ in range(2)])
    loader.load_state_dict(loader.state_dict())
    show()
    return [first, bits(loader), bits(loader)]


def outcome(make, scenario, *, shows):
    """All batches of a scenario, what is drawn after it, and the loader's state on both sides of ``show``."""
    torch.manual_seed(3)
    states, figures = [], []
    with StreamedLoader(make(), [noisy], device="cpu", seed=1) as loader:

        def look():
            stats = loader.stats()
            states.append((repr(loader.state_dict()) if hasattr(loader, "state_dict") else None, stats, stats.batches))

        def show():
            look()
            figures.extend([gpuaug.show(loader, n=1)] if shows else [])
            look()

        batches = scenario(loader, show)
    before, after = states
    assert before == after
    assert before[1] is after[1]
    return batches, torch.rand(3).tolist(), figures


CASES = [  # each kind with each scenario: half of them are slow
    pytest.param(kind, scenario, marks=pytest.mark.slow if (number + index) % 2 else ())
    for number, kind in enumerate(list(KINDS)[:-4])
    for index, scenario in enumerate((fresh, between, chosen, middle))
]
CASES += [("workers that draw", middle)]
CASES += [pytest.param("workers that draw", scenario, marks=pytest.mark.slow) for scenario in (fresh, between, chosen)]
CASES += [("workers that persist", between), ("workers that persist and draw", fresh)]
CASES += [("a state", scenario) for scenario in (fresh, between, middle, loaded)]


@pytest.mark.parametrize(("kind", "scenario"), CASES)
def test_later_batches_are_unchanged(kind, scenario):
    batches, then, _ = outcome(KINDS[kind], scenario, shows=False)
    shown, shown_then, (figure,) = outcome(KINDS[kind], scenario, shows=True)
    assert (shown, shown_then) == (batches, then)
    if scenario is not middle:  # where the open iterator may draw from what the next one begins from
        images = torch.tensor(batches[{fresh: 0, between: 1, chosen: 0, loaded: 1}[scenario]][0][0])[:1]
        got = [channels_first(each) for each in pixels(figure)[len(images) :]]
        assert torch.equal(torch.stack(got), images)
    epoch = {fresh: 0, between: 1, chosen: 5, middle: 1, loaded: 0}[scenario]
    assert f"in batch {2 if scenario is loaded else 0} of epoch {epoch}," in texts(figure)[0]
    processes.assert_no_workers_or_feeds()


def test_persistent_workers_end_if_they_had_not_begun():
    with StreamedLoader(KINDS["workers that persist"](), device="cpu") as loader:
        gpuaug.show(loader)
        processes.assert_no_workers_or_feeds()


def test_open_iterator_on_persistent_workers_is_refused_and_goes_on():
    with StreamedLoader(KINDS["workers that persist"](), device="cpu") as loader:
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
