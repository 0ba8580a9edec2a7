"""Advice about the inputs of a call of a fused pipeline: images, and what follows them."""

import kornia.augmentation as K
import torch
from PIL import Image
from support.files.encoded import encoded
from support.messages.registry import example
from support.messages.values import BOXES, FLIP, FLIPPED, IMAGES, MASK, fuse_some
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug

BY_KORNIA = K.AugmentationSequential(K.RandomHorizontalFlip(p=1.0), data_keys=["input", "bbox_xyxy"])(IMAGES / 255, BOXES)[1]
"""``BOXES`` after Kornia's horizontal flip, which counts pixels from their centres."""


@example("Merge the leading axes into one batch axis")
def several_clips_of_a_sample(told):
    several = torch.rand(2, 3, 4, 3, 8, 8)
    augment = gpuaug.fuse(K.RandomCrop((4, 4)))
    with told:
        augment(several)
    assert augment(several.flatten(0, -5)).shape == (6, 4, 3, 4, 4)


@example("For images, put its modules into another container")
def images_for_a_video_sequential(told):
    video = K.VideoSequential(K.RandomHorizontalFlip(p=1.0))
    images = torch.rand(2, 3, 8, 8)
    with told:
        gpuaug.fuse(video)(images)
    assert torch.equal(gpuaug.fuse(K.AugmentationSequential(*video.children()))(images), images.flip(-1))


@example("Pass their magnitudes, scaled to [0, 1]")
def complex_images(told):
    images = torch.tensor([3.0 + 4.0j, 0.0]).view(1, 1, 1, 2) / 5
    augment = gpuaug.fuse([FLIP])
    with told:
        augment(images)
    torch.testing.assert_close(augment(images.abs()), torch.tensor([0.0, 1.0]).view(1, 1, 1, 2))


@example("Leave the transform out, or give the images three channels")
def images_of_other_channels_than_a_module_takes(told):
    augment = gpuaug.fuse([FLIP, K.RandomHue((0.1, 0.1), p=1.0)])
    for images in (torch.cat((IMAGES, IMAGES), 1), IMAGES[:, :1]):
        with told:
            augment(images)
        assert gpuaug.fuse(FLIP)(images).shape == images.shape
        three = images[:, :3] if images.shape[1] > 1 else images.expand(-1, 3, -1, -1)
        assert augment(three).shape == IMAGES.shape


@example("In a stage, select the images with on=")
def labels_taken_for_images(told):
    augment = gpuaug.fuse(FLIP)
    with told:
        list(gpuaug.StreamedLoader([(torch.arange(2), IMAGES)], [augment], device="cpu"))
    stage = gpuaug.TransformStage(augment, on=1)
    ((_, got),) = gpuaug.StreamedLoader([(torch.arange(2), IMAGES)], [stage], device="cpu")
    assert torch.equal(got, IMAGES.flip(-1))
    x = IMAGES[0, 0]
    assert torch.equal(augment(x[None]).view(8, 8), x.flip(-1))


@example("pack images of several sizes: gpuaug.collate_ragged(…)")
def images_in_a_list(told):
    images = list(IMAGES)
    with told:
        gpuaug.fuse(FLIP)(images)
    assert torch.equal(gpuaug.fuse(FLIP)(torch.stack(images)), IMAGES.flip(-1))
    packed = gpuaug.collate_ragged([torch.zeros(3, 8, 9, dtype=torch.uint8), IMAGES[0]])
    assert gpuaug.fuse(v2.Resize((4, 4)), ragged=True)(packed).shape == (2, 3, 4, 4)


@example("Put a gpuaug.DecodeStage() before this stage")
def encoded_images(told):
    batch = gpuaug.collate_encoded([encoded(16, 16)])
    augment = gpuaug.fuse(v2.Resize((4, 4)), ragged=True)
    with told:
        list(gpuaug.StreamedLoader([batch], [augment], device="cpu"))
    (got,) = gpuaug.StreamedLoader([batch], [gpuaug.DecodeStage(), augment], device="cpu")
    assert got.shape == (1, 3, 4, 4)


@example("as v2.ToImage() does")
def pil_images(told):
    image = Image.new("RGB", (8, 8), (1, 2, 3))
    with told:
        gpuaug.fuse(FLIP)(image)
    got = gpuaug.fuse(FLIP)(torch.stack([v2.ToImage()(image), v2.ToImage()(image)]))
    assert got[0, :, 0, 0].tolist() == [1, 2, 3]


@example("Pad the samples to one length")
def ragged_boxes_in_a_list(told):
    samples, augment = [BOXES[0], BOXES.view(2, 4)], gpuaug.fuse(FLIP)
    with told:
        augment(IMAGES, samples, data_keys=["input", "bbox_xyxy"])
    padded = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    _, got = augment(IMAGES, padded, data_keys=["input", "bbox_xyxy"])
    assert torch.equal(got[1], BY_KORNIA.view(2, 4))
    _, followed = augment(IMAGES, [{"boxes": each} for each in samples], data_keys=["input", "targets"])
    assert torch.equal(followed[0]["boxes"], FLIPPED[0])
    assert torch.equal(followed[1]["boxes"], FLIPPED.view(2, 4))


@example("Pass one mask per image: list(masks), in a loader by gpuaug.TransformStage(lambda masks: list(masks), on=…)")
def masks_that_a_stage_decodes(told):
    files = [encoded(20 + 2 * number, 30, "PNG", seed=number, mode="L") for number in range(3)]
    batch = gpuaug.collate_encoded([{"image": file, "mask": file} for file in files])
    stages = [gpuaug.DecodeStage(on="image", channels=1), gpuaug.DecodeStage(on="mask", channels=1)]
    augment = gpuaug.fuse([v2.RandomHorizontalFlip(), v2.RandomCrop(16)], ragged=True, dtype=torch.uint8)
    together = gpuaug.TransformStage(augment, on={"image": "input", "mask": "mask"})
    with told:
        next(iter(gpuaug.StreamedLoader([batch], [*stages, together], device="cpu")))
    stages.append(gpuaug.TransformStage(lambda masks: list(masks), on="mask"))
    made = next(iter(gpuaug.StreamedLoader([batch], [*stages, together], device="cpu")))
    assert torch.equal(made["image"], torch.stack(list(made["mask"])))


@example("Pass a dict per frame, with the data key 'targets': [{'masks': mask} for mask in masks]")
def masks_of_ragged_clips(told):
    clips = [torch.randint(0, 256, (2, 1, 10, 12 + number), dtype=torch.uint8) for number in range(3)]
    videos = gpuaug.collate_ragged(clips, channels=1)
    augment = gpuaug.fuse([v2.RandomHorizontalFlip(), v2.RandomCrop(8)], ragged=True, dtype=torch.uint8)
    with told:
        augment(videos, videos, data_keys=["input", "mask"])
    made, dicts = augment(videos, [{"masks": mask} for mask in videos], data_keys=["input", "targets"])
    assert torch.equal(made.flatten(0, 1), torch.stack([record["masks"] for record in dicts]))


@example("Pass one tensor for the whole batch: torch.as_tensor(…)")
def boxes_of_numpy(told):
    boxes, augment = BOXES.numpy(), gpuaug.fuse(FLIP)
    with told:
        augment(IMAGES, boxes, data_keys=["input", "bbox_xyxy"])
    assert torch.equal(augment(IMAGES, torch.as_tensor(boxes), data_keys=["input", "bbox_xyxy"])[1], BY_KORNIA)


@example("Pass images.detach()")
def images_with_gradients(told):
    images = torch.rand(2, 3, 8, 8, requires_grad=True)
    with told:
        gpuaug.fuse(FLIP)(images)
    assert torch.equal(gpuaug.fuse(FLIP)(images.detach()), images.detach().flip(-1))


@example("Name each input in a list")
def data_keys_as_text(told):
    augment = gpuaug.fuse(FLIP)
    with told:
        augment(IMAGES, MASK, data_keys="mask")
    assert torch.equal(augment(IMAGES, MASK, data_keys=["input", "mask"])[1], MASK.flip(-1))


@example("Name all: data_keys=['input', 'mask']")
def unnamed_input(told):
    augment, batch = gpuaug.fuse(FLIP), (IMAGES, MASK)
    with told:
        augment(*batch)
    assert torch.equal(augment(*batch, data_keys=["input", "mask"])[1], MASK.flip(-1))
    stage = gpuaug.TransformStage(augment, on={0: "input", 1: "mask"})
    ((_, mask),) = gpuaug.StreamedLoader([batch], [stage], device="cpu")
    assert torch.equal(mask, MASK.flip(-1))


@example("Name target dicts 'targets': data_keys=['input', 'targets'], and other containers 'tv_tensors'")
def targets_as_class(told):
    augment = gpuaug.fuse(FLIP)
    dicts = [{"boxes": torch.tensor([[1.0, 2.0, 3.0, 4.0]])} for _ in IMAGES]
    typed = {"map": tv_tensors.Mask(MASK[:, 0])}
    for targets in (dicts, dicts[0], typed, [typed]):
        with told:
            augment(IMAGES, targets, data_keys=["input", "class"])
    width = IMAGES.shape[-1]
    flipped = augment(IMAGES, dicts, data_keys=["input", "targets"])[1]
    assert flipped[0]["boxes"].tolist() == [[width - 3, 2, width - 1, 4]]
    assert torch.equal(augment(IMAGES, typed, data_keys=["input", "tv_tensors"])[1]["map"], typed["map"].flip(-1))


@example("Pass its values with their data keys")
def dict_of_kornia(told):
    batch, augment = {"image": IMAGES, "mask": MASK}, gpuaug.fuse(FLIP)
    with told:
        augment(batch)
    images, mask = augment(batch["image"], batch["mask"], data_keys=["input", "mask"])
    assert torch.equal(images, IMAGES.flip(-1))
    assert torch.equal(mask, MASK.flip(-1))
    stage = gpuaug.TransformStage(augment, on={"image": "input", "mask": "mask"})
    (got,) = gpuaug.StreamedLoader([batch], [stage], device="cpu")
    assert torch.equal(got["mask"], mask)


@example("Pass the masks as a list: list(masks)")
def stacked_masks_of_ragged_images(told):
    images, other = gpuaug.collate_ragged(list(IMAGES)), gpuaug.collate_ragged([IMAGES[0], IMAGES[1, :, :6]])
    augment, masks = gpuaug.fuse(v2.Resize((4, 4)), ragged=True), MASK
    with told:
        augment(other, masks, data_keys=["input", "mask"])
    _, got = augment(images, list(masks), data_keys=["input", "mask"])
    assert got[0].shape == (1, 4, 4)


@example("Mark the boxes that are not padding")
def counts_in_place_of_valid(told):
    augment, counts = gpuaug.fuse(FLIP), torch.tensor([1, 0])
    with told:
        augment(IMAGES, BOXES, counts, data_keys=["input", "bbox_xyxy", "valid"])
    valid = torch.arange(BOXES.shape[1]) < counts[:, None]
    _, _, got = augment(IMAGES, BOXES, valid, data_keys=["input", "bbox_xyxy", "valid"])
    assert got.tolist() == [[True], [False]]


@example("Number the labels: torch.unique(mask, return_inverse=True)[1]")
def masks_of_large_labels(told):
    mask = torch.tensor([2**24 + 1, 7]).repeat(2, 1, 8, 4)
    images = IMAGES.float() / 255
    augment = fuse_some(K.RandomElasticTransform(alpha=(0.0, 0.0), p=1.0))
    with told:
        augment(images, mask, data_keys=["input", "mask"])
    labels = torch.unique(mask, return_inverse=True)[1]
    _, got = augment(images, labels, data_keys=["input", "mask"])
    assert torch.equal(torch.unique(mask)[got.long()], mask)


@example("outside of other containers, or mix in the dataset")
def labels_beside_a_mix_that_kornia_runs(told):
    invert, keys = K.RandomInvert(p=1.0), ["input", "class"]
    mixes = [K.RandomMixUpV2((0.5, 0.5), p=1.0), K.RandomCutMixV2(num_mix=1, p=1.0, use_correct_lambda=True)]
    with told:
        fuse_some(K.AugmentationSequential(invert, mixes[0], random_apply=2))(IMAGES, torch.arange(2), data_keys=keys)
    for mix in mixes:
        assert gpuaug.fuse([invert, mix], num_classes=2)(IMAGES, torch.arange(2), data_keys=keys)[1].shape == (2, 2)


@example("converts them to one-hot labels")
def one_hot_labels_for_kornia(told):
    labels = torch.tensor([0, 2])
    with told:
        gpuaug.fuse(K.RandomMixUpV2())(IMAGES, torch.nn.functional.one_hot(labels, 3), data_keys=["input", "class"])
    augment = gpuaug.fuse(K.RandomMixUpV2(), num_classes=3)
    torch.testing.assert_close(augment(IMAGES, labels, data_keys=["input", "class"])[1].sum(1), torch.ones(2))
