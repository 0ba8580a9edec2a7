"""Advice about the wrapped loader and about collate functions."""

import functools
import re
import threading

import numpy as np
import torch
from PIL import Image
from support.messages.registry import example, untried
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler, TensorDataset
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug

IMAGES = torch.arange(2 * 3 * 8 * 8, dtype=torch.uint8).view(2, 3, 8, 8)
COLOUR = Image.new("RGB", (8, 8), (1, 2, 3))


@example("Pass a DataLoader, a list or a generator")
def number_as_loader(told):
    with told:
        gpuaug.StreamedLoader(3)
    assert len(list(gpuaug.StreamedLoader([IMAGES], device="cpu"))) == 1


@example("loader must be an iterable of batches, got the dataset")
def dataset_as_loader(told):
    dataset = TensorDataset(IMAGES)
    with told:
        gpuaug.StreamedLoader(dataset)
    assert len(list(gpuaug.StreamedLoader(DataLoader(dataset, batch_size=1), device="cpu"))) == 2
    ((got,), _) = gpuaug.StreamedLoader(DataLoader(dataset, batch_size=None), device="cpu")
    assert got.shape == (3, 8, 8)


@example("Leave feed out")
def ring_for_a_list(told):
    with told:
        list(gpuaug.StreamedLoader([IMAGES], device="cpu", feed="ring"))
    assert len(list(gpuaug.StreamedLoader([IMAGES], device="cpu"))) == 1


@example("This iterator ended, because a newer one took over")
def two_iterators_on_persistent_workers(told):
    def made(**options):
        return gpuaug.StreamedLoader(DataLoader(range(6), 2, num_workers=1, **options), device="cpu")

    with made(persistent_workers=True) as loader:
        first = iter(loader)
        next(first)
        next(iter(loader))
        with told:
            next(first)
        assert len(list(loader)) == 3, "finish the first loop"
        assert len(list(loader)) == 3
    with made(persistent_workers=False) as loader:
        first = iter(loader)
        next(first)
        next(iter(loader))
        assert len(list(first)) == 2


@example("This iterator ended, because a newer one reads the same source")
def two_iterators_on_one_generator(told):
    def made():
        return gpuaug.StreamedLoader((IMAGES for _ in range(9)), device="cpu")

    loader = made()
    first = iter(loader)
    next(first)
    next(iter(loader))
    with told:
        next(first)
    loader = made()
    assert len(list(loader)) == 9, "finish the first loop"
    assert list(loader) == []
    first, second = iter(made()), iter(made())
    assert [len(list(pair)) for pair in zip(first, second, strict=True)] == [2] * 9


@example("This iterator ended, because its loader was closed")
def iterator_of_a_closed_loader(told):
    loader = gpuaug.StreamedLoader([IMAGES] * 2, device="cpu")
    batches = iter(loader)
    next(batches)
    loader.close()
    with told:
        next(batches)
    assert len(list(iter(loader))) == 2


@example("next() cannot run", "close() cannot run")
def two_threads_on_an_iterator(told):
    entered, leave = threading.Event(), threading.Event()

    def waits(batch):
        entered.set()
        assert leave.wait(30)
        return batch

    loader = gpuaug.StreamedLoader([IMAGES] * 3, [waits], device="cpu")
    batches = iter(loader)
    other = threading.Thread(target=next, args=(batches,))
    other.start()
    assert entered.wait(30)
    with told:
        next(batches)
    with told:
        batches.close()
    leave.set()
    other.join()
    lock = threading.Lock()
    with lock:
        assert len(list(batches)) == 2
    assert len(list(iter(loader))) == 3
    loader.close()


@example("A stage cannot read this loader")
def stage_that_reads_its_own_loader(told):
    def reads(batch):
        return batch + next(iter(loader))

    loader = gpuaug.StreamedLoader([IMAGES], [reads], device="cpu")
    with told:
        list(loader)
    second = gpuaug.StreamedLoader([IMAGES], device="cpu")
    (got,) = gpuaug.StreamedLoader([IMAGES], [lambda batch: batch + next(iter(second))], device="cpu")
    assert torch.equal(got, IMAGES + IMAGES)


@example("Pass the function itself to the DataLoader: collate_fn=…")
def called_collate_function(told):
    with told:
        gpuaug.collate_ragged(IMAGES[0])
    (got,) = DataLoader(IMAGES, batch_size=2, collate_fn=gpuaug.collate_ragged)
    assert torch.equal(got[0], IMAGES[0])


@example("Leave empty batches out of the batch sampler")
def empty_batch(told):
    sampler = [[], [0, 1]]
    with told:
        list(DataLoader(IMAGES, batch_sampler=sampler, collate_fn=gpuaug.collate_ragged))
    sampler = BatchSampler(SequentialSampler(IMAGES), 2, drop_last=False)
    assert len(list(DataLoader(IMAGES, batch_sampler=sampler, collate_fn=gpuaug.collate_ragged))) == 1


@example("Return samples with the same members from the dataset")
def samples_of_two_forms(told):
    with told:
        gpuaug.collate_ragged([(IMAGES[0], 1), (IMAGES[1],)])
    assert gpuaug.collate_ragged([(IMAGES[0], 1), (IMAGES[1], 2)])[1].tolist() == [1, 2]


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


@example("Remove the conversion to float, such as ToTensor, from the dataset, and convert in gpuaug.fuse")
def floating_images(told):
    with told:
        gpuaug.collate_ragged([v2.ToDtype(torch.float32, scale=True)(image) for image in IMAGES])
    packed = gpuaug.collate_ragged(list(IMAGES))
    augment = gpuaug.fuse([v2.Resize((8, 8)), v2.ToDtype(torch.float32, scale=True)], ragged=True)
    torch.testing.assert_close(augment(packed), IMAGES / 255)


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


@example("Images of a batch must have the type and number of channels of the first")
def images_of_two_types_in_a_batch(told):
    deep, plain = np.array([[[300, 60000]]], np.uint16), np.zeros((1, 1, 2), np.uint8)
    with told:
        gpuaug.collate_ragged([deep, plain], channels=None)
    assert gpuaug.collate_ragged([deep, plain.astype(np.uint16) * 257], channels=None)[0].flatten().tolist() == [300, 60000]


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


@example("A member must be an image in all samples or a clip in all samples")
def image_among_clips(told):
    clip = IMAGES[:, :, :4]
    for samples in ([clip, IMAGES[0]], [IMAGES[0], clip]):
        with told:
            gpuaug.collate_ragged(samples)
    assert gpuaug.collate_ragged([clip, IMAGES[:1].repeat(2, 1, 1, 1)]).shapes.frames == 2


@example("Return the same number of frames from the dataset")
def clips_that_a_dataset_decodes_of_several_lengths(told):
    with told:
        gpuaug.collate_ragged([IMAGES, IMAGES[:1]])
    assert len(gpuaug.collate_ragged([IMAGES[:1], IMAGES[1:]])) == 2


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


@example("Images must have pixels, got … in")
def image_without_pixels(told):
    with told:
        gpuaug.collate_ragged([IMAGES[0], IMAGES[1, :, :0]])
    assert len(gpuaug.collate_ragged([IMAGES[0]])) == 1


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


@example("travel without slots")
def batches_larger_than_feed_bytes(told):
    images = TensorDataset(torch.zeros(64, 3, 8, 8))

    def slots(feed_bytes, batch_size):
        wrapped = DataLoader(images, batch_size=batch_size, num_workers=1)
        with gpuaug.StreamedLoader(wrapped, device="cpu", feed="ring", feed_bytes=feed_bytes) as loader:
            assert len(list(loader)) == 64 / batch_size
            return loader.stats().slot_batches

    with told:
        slots(4096, 8)
    takes = int(re.search(r"takes (\d+) bytes", told.last)[1])
    assert slots(takes, 8) > 0
    assert slots(4096, 4) > 0


untried("needs two GiB", "The images of a batch must have fewer than 2**31 values")
untried(
    "needs a limit of memory; see tests/feed/ring/test_exhausted_resources.py",
    "A worker could not send a batch",
    "The ring cannot be created",
)
untried(
    "needs a GPU; see tests/feed/test_ring.py and tests/feed/ring/test_exhausted_resources.py",
    "Batches travel without page-locked slots",
    "Copies of batches make the training thread wait",
)
untried("needs ranks", "got a DataLoaderDispatcher", "The optimizer makes no step for the last")


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
