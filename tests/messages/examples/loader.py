"""Advice about loaders, their states and their profiles."""

import torch
from support.loader.checkpoints import Tape
from support.messages.registry import example
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


@example("Wrap it: gpuaug.StreamedLoader(loader)")
def plain_loader_to_be_shown(told):
    loader = DataLoader(torch.zeros(4, 3, 4, 4), batch_size=2)
    with told:
        gpuaug.show(loader)
    gpuaug.show(gpuaug.StreamedLoader(loader, device="cpu"), n=1)


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


@example("For a step of two arguments, pass lambda batch: step(*batch)")
def step_of_two_arguments(told):
    def step(images, labels):
        return images.sum() + labels.sum()

    streamed = gpuaug.StreamedLoader([(torch.zeros(2, 3), torch.zeros(2))] * 3, device="cpu")
    with told:
        gpuaug.profile(streamed, step, batches=8, rounds=1, show=False)
    gpuaug.profile(streamed, lambda batch: step(*batch), batches=8, rounds=1, show=False)
