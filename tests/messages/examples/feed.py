"""Advice about the wrapped loader and about collate functions."""

import functools

import numpy as np
import torch
from PIL import Image
from support.messages.registry import example
from support.messages.values import IMAGES
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug

COLOUR = Image.new("RGB", (8, 8), (1, 2, 3))


@example("loader must be an iterable of batches, got the dataset")
def dataset_as_loader(told):
    dataset = TensorDataset(IMAGES)
    with told:
        gpuaug.StreamedLoader(dataset)
    assert len(list(gpuaug.StreamedLoader(DataLoader(dataset, batch_size=1), device="cpu"))) == 2
    ((got,), _) = gpuaug.StreamedLoader(DataLoader(dataset, batch_size=None), device="cpu")
    assert got.shape == (3, 8, 8)


@example("Pass the function itself to the DataLoader: collate_fn=…")
def called_collate_function(told):
    with told:
        gpuaug.collate_ragged(IMAGES[0])
    (got,) = DataLoader(IMAGES, batch_size=2, collate_fn=gpuaug.collate_ragged)
    assert torch.equal(got[0], IMAGES[0])


@example("into a dict in the sample, such as {'boxes': …}")
def boxes_beside_ragged_images(told):
    boxes = [torch.zeros(1, 4), torch.zeros(2, 4)]
    with told:
        gpuaug.collate_ragged(list(zip(IMAGES, boxes, strict=True)))
    _, got = gpuaug.collate_ragged([(image, {"boxes": each}) for image, each in zip(IMAGES, boxes, strict=True)])
    assert [len(each["boxes"]) for each in got] == [1, 2]
    masks = [torch.zeros(8, 8), torch.zeros(5, 6)]
    with told:
        gpuaug.collate_ragged(list(zip(IMAGES, masks, strict=True)))
    _, got = gpuaug.collate_ragged([*zip(IMAGES, map(tv_tensors.Mask, masks), strict=True)])
    assert [mask.shape for mask in got] == [(8, 8), (5, 6)]


@example("Images must be uint8, got … in …", "Images must have 8 bits per channel, got … in …")
def images_of_more_bits(told):
    tensor = torch.tensor([300, 60000], dtype=torch.int32).to(torch.uint16).view(1, 1, 2)
    for image in (tensor, Image.fromarray(tensor[0].numpy())):
        with told:
            gpuaug.collate_ragged([image])
        collate = functools.partial(gpuaug.collate_ragged, channels=None)
        assert collate([image])[0].tolist() == [[[300, 60000]]]
    with told:
        gpuaug.collate_ragged([tensor.int() * 65536])
    got = gpuaug.collate_ragged([v2.functional.to_dtype(tensor, torch.uint8, scale=True)], channels=1)
    assert got[0].tolist() == [[[1, 234]]]


@example("Images must be grey or RGB, of 8 or 16 bits", "convert must be left out with channels=None")
def images_that_are_not_packed_as_they_are(told):
    image = Image.new("CMYK", (2, 1))
    with told:
        gpuaug.collate_ragged([image], channels=None)
    assert gpuaug.collate_ragged([image.convert("RGB")], channels=None)[0].shape == (3, 1, 2)
    with told:
        gpuaug.collate_ragged([image], channels=None, convert=True)
    assert gpuaug.collate_ragged([image], channels=3, convert=True)[0].shape == (3, 1, 2)


@example("For a grey tensor (H, W), return image[None]")
def grey_image_without_channels(told):
    image = IMAGES[0, 0]
    with told:
        gpuaug.collate_ragged([image], channels=1)
    assert torch.equal(gpuaug.collate_ragged([image[None]], channels=1)[0], image[None])


@example("Decode the image in the dataset: PIL.Image.open(…) or cv2.imread(…)")
def path_as_image(told, path="x.png"):
    with told:
        gpuaug.collate_ragged([(path, 1)])
    import io

    import PIL

    file = io.BytesIO()
    COLOUR.save(file, "PNG")
    assert gpuaug.collate_ragged([(PIL.Image.open(file), 1)])[0][0][:, 0, 0].tolist() == [1, 2, 3]
    assert "imread"


@example("Return image.convert(…) from the dataset")
def grey_image_among_colour_images(told):
    grey = Image.new("L", (8, 8), 7)
    with told:
        gpuaug.collate_ragged([grey])
    for got in (
        gpuaug.collate_ragged([grey.convert("RGB")]),
        functools.partial(gpuaug.collate_ragged, convert=True)([grey]),
    ):
        assert got[0][:, 0, 0].tolist() == [7, 7, 7]
    masks = [grey, grey.resize((5, 6))]
    photographs = [mask.convert("RGB") for mask in masks]
    with told:
        gpuaug.collate_ragged([*zip(photographs, masks, strict=True)])
    samples = [(photograph, tv_tensors.Mask(mask)) for photograph, mask in zip(photographs, masks, strict=True)]
    assert [mask.shape for mask in gpuaug.collate_ragged(samples)[1]] == [(1, 8, 8), (1, 6, 5)]


@example("image.permute(2, 0, 1) of a tensor, image.transpose(1, 2, 0) of an array")
def channels_in_the_wrong_place(told):
    image = torch.zeros(8, 9, 3, dtype=torch.uint8)
    with told:
        gpuaug.collate_ragged([image])
    assert gpuaug.collate_ragged([image.permute(2, 0, 1)])[0].shape == (3, 8, 9)
    image = np.zeros((3, 8, 9), np.uint8)
    with told:
        gpuaug.collate_ragged([image])
    assert gpuaug.collate_ragged([image.transpose(1, 2, 0)])[0].shape == (3, 8, 9)


@example("Return image.cpu()")
def image_on_a_device(told):
    with told:
        gpuaug.collate_ragged([IMAGES[0].to("meta")])
    assert torch.equal(gpuaug.collate_ragged([IMAGES[0].cpu()])[0], IMAGES[0])


@example("Take images one by one: list(images)[…]")
def slice_of_a_ragged_batch(told):
    images = gpuaug.collate_ragged(list(IMAGES))
    with told:
        images[0:1]
    assert torch.equal(list(images)[1], IMAGES[1])


class Shuffled(Sampler):
    def __init__(self, name):
        setattr(self, name, torch.Generator().manual_seed(1))

    def __len__(self):
        return 8

    def __iter__(self):
        return iter(torch.randperm(8, generator=getattr(self, "generator", None) or self.hidden).tolist())


@example("The run cannot be resumed, because the sampler returns other batches")
def sampler_with_a_hidden_generator(told):
    def made(name):
        return gpuaug.StreamedLoader(DataLoader(range(8), 2, sampler=Shuffled(name)), device="cpu", seed=1)

    loader = made("hidden")
    whole = [list(loader), list(loader)]
    state = loader.state_dict()
    with told:
        made("hidden").load_state_dict(state)
    assert whole[0][0].tolist() != whole[1][0].tolist()
    resumed = made("hidden")
    resumed.load_state_dict(state, strict=False)
    assert len(list(resumed)) == 4
    loader, resumed = made("generator"), made("generator")
    list(loader)
    resumed.load_state_dict(loader.state_dict())
    assert all(map(torch.equal, resumed, loader))
