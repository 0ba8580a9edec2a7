"""Advice about loaders, their states and their profiles."""

import os

import torch
from support.loader.checkpoints import Tape
from support.messages.registry import example, untried
from torch.utils.data import DataLoader
from torchvision import tv_tensors

import gpuaug

BATCHES = [torch.zeros(2, 3, 4, 4)] * 3


def loader(**options):
    return gpuaug.StreamedLoader(DataLoader(range(8), batch_size=2, **options), device="cpu", seed=0)


def stopped(streamed):
    """The state of a loader after its first batch."""
    next(iter(streamed))
    return streamed.state_dict()


@example("state['source'] must be the state of a …, got …. Pass what state_dict() of a StreamedLoader around a …")
def state_of_another_kind_of_loader(told):
    from torchdata.stateful_dataloader import StatefulDataLoader

    state = stopped(loader())
    with told:
        gpuaug.StreamedLoader(StatefulDataLoader(range(8), 2), device="cpu", seed=0).load_state_dict(state)
    stateful = gpuaug.StreamedLoader(StatefulDataLoader(range(8), 2), device="cpu", seed=0)
    next(iter(stateful))
    gpuaug.StreamedLoader(StatefulDataLoader(range(8), 2), device="cpu", seed=0).load_state_dict(stateful.state_dict())


@example("Pass what state_dict() of a StreamedLoader returned")
def state_of_a_dataloader(told):
    state = stopped(loader())
    with told:
        loader().load_state_dict({**state, "seed": "x"})
    streamed = loader()
    next(iter(streamed))
    loader().load_state_dict(streamed.state_dict())


@example("persistent_workers must be False to go on from the end of an epoch")
def persistent_workers_behind_an_epoch(told):
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make(**options):
        return gpuaug.StreamedLoader(StatefulDataLoader(Tape(), 2, num_workers=1, **options), device="cpu", seed=0)

    with make(persistent_workers=True) as streamed:
        whole, state = list(streamed), streamed.state_dict()
    with make(persistent_workers=True) as resumed, told:
        resumed.load_state_dict(state)
        list(resumed)
    with make(persistent_workers=False) as resumed:
        resumed.load_state_dict(state)
        assert len(list(resumed)) == len(whole)


@example("The state cannot be loaded, because it is from before the first batch")
def state_from_before_the_first_batch(told):
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make():
        return gpuaug.StreamedLoader(StatefulDataLoader(Tape(), 2), device="cpu", seed=0)

    streamed = make()
    state = streamed.state_dict()
    next(iter(streamed))
    with told:
        streamed.load_state_dict(state)
    renewed = make()
    renewed.load_state_dict(state)
    assert len(list(renewed)) == 8


@example("To resume with different batches, pass strict=False to load_state_dict")
def state_of_another_batch_size(told):
    state = stopped(loader())
    other = gpuaug.StreamedLoader(DataLoader(range(8), batch_size=4), device="cpu", seed=0)
    with told:
        other.load_state_dict(state)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gpuaug.GpuAugWarning)
        other.load_state_dict(state, strict=False)
    assert len(list(other)) == 2


@example("loader must stay the … that was wrapped")
def another_wrapped_loader(told):
    streamed, other = gpuaug.StreamedLoader(BATCHES, [torch.negative], device="cpu"), [torch.ones(2)]
    with told:
        streamed.loader = other
    (got,) = gpuaug.StreamedLoader(other, streamed.stages, device="cpu")
    assert got.tolist() == [-1, -1]


@example("A StreamedLoader has no multiprocessing_context")
def loader_that_a_framework_makes_again(told):
    with told:
        assert loader().multiprocessing_context
    from gpuaug.integrations import accelerate

    assert callable(accelerate.skip_first_batches)


@example("loader must wrap an iterable that can be iterated repeatedly")
def generator_to_be_shown(told):
    with told:
        gpuaug.show(gpuaug.StreamedLoader(iter(BATCHES), device="cpu"))
    gpuaug.show(gpuaug.StreamedLoader(BATCHES, device="cpu"), n=1)


@example("Wrap it: gpuaug.StreamedLoader(loader)")
def plain_loader_to_be_shown(told):
    loader = DataLoader(torch.zeros(4, 3, 4, 4), batch_size=2)
    with told:
        gpuaug.show(loader)
    gpuaug.show(gpuaug.StreamedLoader(loader, device="cpu"), n=1)


@example("Finish its loop first, or close() the loader")
def open_iterator_on_persistent_workers(told):
    source = DataLoader(torch.zeros(4, 3, 4, 4), batch_size=1, num_workers=1, persistent_workers=True)
    with gpuaug.StreamedLoader(source, device="cpu") as streamed:
        batches = iter(streamed)
        next(batches)
        with told:
            gpuaug.show(streamed, n=1)
        for _ in batches:
            pass
        gpuaug.show(streamed, n=1)
        next(iter(streamed))
        streamed.close()
        gpuaug.show(streamed, n=1)


@example("Pass on= with the member of the images to the first stage")
def images_beside_labels_to_be_shown(told):
    batches = [{"x": torch.zeros(2, 3, 4, 4, dtype=torch.int64), "name": ["a", "b"]}]
    with told:
        gpuaug.show(gpuaug.StreamedLoader(batches, device="cpu"), n=1)
    batches = [(torch.arange(2), torch.zeros(2, 3, 4, 4))]
    gpuaug.show(gpuaug.StreamedLoader(batches, [gpuaug.TransformStage(torch.neg, on=1)], device="cpu"), n=1)


@example("boxes must be axis-aligned to be drawn")
def rotated_boxes_to_be_drawn(told):
    images = torch.zeros(1, 3, 8, 8)
    rotated = tv_tensors.BoundingBoxes(torch.tensor([[1.0, 2, 3, 3, 0]]), format="XYWHR", canvas_size=(8, 8))
    with told:
        gpuaug.show(gpuaug.StreamedLoader([(images, [{"boxes": rotated}])], device="cpu"), n=1)
    from torchvision.transforms import v2

    corners = v2.functional.convert_bounding_box_format(rotated, new_format="XYXYXYXY").view(-1, 4, 2)
    boxes = torch.cat((corners.amin(1), corners.amax(1)), 1)
    gpuaug.show(gpuaug.StreamedLoader([(images, [{"boxes": boxes}])], device="cpu"), n=1)


@example("Pass a function of one batch")
def step_that_is_no_function(told):
    with told:
        gpuaug.profile(gpuaug.StreamedLoader(BATCHES, device="cpu"), 3)
    gpuaug.profile(gpuaug.StreamedLoader(BATCHES, device="cpu"), lambda batch: batch.sum(), batches=8, rounds=1, show=False)


@example("For a step of two arguments, pass lambda batch: step(*batch)")
def step_of_two_arguments(told):
    def step(images, labels):
        return images.sum() + labels.sum()

    streamed = gpuaug.StreamedLoader([(torch.zeros(2, 3), torch.zeros(2))] * 3, device="cpu")
    with told:
        gpuaug.profile(streamed, step, batches=8, rounds=1, show=False)
    gpuaug.profile(streamed, lambda batch: step(*batch), batches=8, rounds=1, show=False)


@example("Write 'timeline.png'")
def timeline_without_a_path(told):
    import tempfile

    streamed = gpuaug.StreamedLoader(BATCHES, device="cpu")
    timeline = gpuaug.profile(streamed, lambda batch: batch.sum(), batches=8, rounds=1, show=False).timeline
    with told:
        timeline.save(3)
    with tempfile.TemporaryDirectory() as folder:
        timeline.save(os.path.join(folder, "timeline.png"))


@example("Write 'cuda', 'cuda:1' or 'cpu'")
def no_device(told):
    with told:
        gpuaug.StreamedLoader(BATCHES, device="gpu")
    assert len(list(gpuaug.StreamedLoader(BATCHES, device="cpu"))) == 3


@example("Pass None for no ratios")
def unknown_baseline(told):
    from gpuaug.benchkit import windows

    with told:
        windows.summarise({}, baseline="b")
    assert windows.summarise({}, baseline=None) == []


untried(
    "needs ranks, a forked process or a slow stage; see tests/loader, tests/contract and tests/core/test_rng.py",
    "Each of … ranks reads all",
    "This iterator cannot be read here",
    "A stage could not use torch's global generators",
    "Random numbers outside of a stage are drawn from the state of a stage",
)
untried("needs a GPU; see tests/gpu/test_faults.py", "gpuaug: up to")
untried(
    "of a command; see tests/profiler/test_cli.py and tests/benchkit",
    "No timeline can be drawn",
    "target must name an existing file",
    "must return a loader and a step",
    "value must be a number of at least",
    "device must be a device that torch can use here",
    "There are no photographs to read",
    "data must be a folder of class folders",
)
