"""Advice about the inputs of a call of a fused pipeline: images, and what follows them."""

import kornia.augmentation as K
import torch
from kornia.geometry.boxes import Boxes
from PIL import Image
from support.files.encoded import encoded
from support.messages.registry import example, untried
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug

IMAGES = torch.arange(2 * 3 * 8 * 8, dtype=torch.uint8).view(2, 3, 8, 8)
FLIP = v2.RandomHorizontalFlip(1.0)
TO_FLOAT = v2.ToDtype(torch.float32, scale=True)
BOXES = torch.tensor([[[1.0, 2, 4, 5]], [[2.0, 1, 6, 6]]])
FLIPPED = torch.tensor([[[4.0, 2, 7, 5]], [[2.0, 1, 6, 6]]])
"""What torchvision's flip makes of them."""
BY_KORNIA = K.AugmentationSequential(K.RandomHorizontalFlip(p=1.0), data_keys=["input", "bbox_xyxy"])(IMAGES / 255, BOXES)[1]
"""What Kornia's flip makes of them: it counts pixels from their centres."""
MASK = torch.arange(2 * 64).view(2, 1, 8, 8)


def targets(**others):
    return [{"boxes": boxes, "labels": torch.tensor([1]), **others} for boxes in BOXES]


@example("Merge the leading axes into one batch axis")
def several_clips_of_a_sample(told):
    several = torch.rand(2, 3, 4, 3, 8, 8)
    augment = gpuaug.fuse(K.RandomCrop((4, 4)))
    with told:
        augment(several)
    assert augment(several.flatten(0, -5)).shape == (6, 4, 3, 4, 4)


@example("Use a separate stage for images of each size")
def cameras_of_two_sizes(told):
    left, right = torch.rand(2, 3, 8, 8), torch.rand(2, 3, 6, 8)
    with told:
        gpuaug.fuse(FLIP)(left, right, data_keys=["input", "input"])
    ragged = [gpuaug.collate_ragged(list(camera.byte())) for camera in (left, right)]
    with told:
        gpuaug.fuse([FLIP, v2.CenterCrop(4)], ragged=True)(*ragged, data_keys=["input", "input"])
    stages = [gpuaug.TransformStage(gpuaug.fuse(FLIP), on=name, name=name) for name in ("left", "right")]
    made = next(iter(gpuaug.StreamedLoader([{"left": left, "right": right}], stages, device="cpu")))
    assert torch.equal(made["right"], right.flip(-1))


@example("For images, put its modules into another container")
def images_for_a_video_sequential(told):
    video = K.VideoSequential(K.RandomHorizontalFlip(p=1.0))
    images = torch.rand(2, 3, 8, 8)
    with told:
        gpuaug.fuse(video)(images)
    assert torch.equal(gpuaug.fuse(K.AugmentationSequential(*video.children()))(images), images.flip(-1))


@example("Fuse each separately, in a stage of its own")
def videos_of_two_forms(told):
    videos = [K.VideoSequential(K.RandomHorizontalFlip(p=1.0), same_on_frame=same) for same in (True, False)]
    with told:
        gpuaug.fuse(videos)
    clips = torch.rand(2, 3, 3, 8, 8)
    stages = [gpuaug.TransformStage(gpuaug.fuse(video), name=str(index)) for index, video in enumerate(videos)]
    (made,) = gpuaug.StreamedLoader([clips], stages, device="cpu")
    assert torch.equal(made, clips)


@example("Scale them to [0, 1] first")
def images_of_32_bits(told):
    images = torch.tensor([300, 1000, 20000, 2**31 - 1], dtype=torch.int32).view(1, 1, 2, 2)
    augment = gpuaug.fuse([FLIP, TO_FLOAT])
    with told:
        augment(images)
    got = augment(v2.functional.to_dtype(images, torch.float32, scale=True))
    torch.testing.assert_close(got, v2.functional.to_dtype(images, torch.float32, scale=True).flip(-1))
    images = images.to(torch.uint32)
    with told:
        augment(images)
    torch.testing.assert_close(augment(images.float() / torch.iinfo(images.dtype).max), got / 2, atol=1e-6, rtol=0)


@example("Pass their magnitudes, scaled to [0, 1]")
def complex_images(told):
    images = torch.tensor([3.0 + 4.0j, 0.0]).view(1, 1, 1, 2) / 5
    augment = gpuaug.fuse([FLIP])
    with told:
        augment(images)
    torch.testing.assert_close(augment(images.abs()), torch.tensor([0.0, 1.0]).view(1, 1, 1, 2))


@example("Leave it out, or give them three channels")
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


@example("Pass its attribute data")
def boxes_of_kornias_class(told):
    augment, keys = gpuaug.fuse(FLIP), ["input", "bbox"]
    boxes = Boxes.from_tensor(torch.tensor([[[1.0, 2, 4, 5]], [[2.0, 1, 6, 6]]]), mode="xyxy")
    with told:
        augment(IMAGES, boxes, data_keys=keys)
    expected = K.AugmentationSequential(K.RandomHorizontalFlip(p=1.0), data_keys=keys)(IMAGES.float(), boxes)[1]
    assert torch.equal(augment(IMAGES, boxes.data, data_keys=keys)[1], expected.to_tensor("vertices_plus"))


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


@example("Pass one tensor for the whole batch.")
def arrays_of_several_lengths(told):
    arrays, augment = [BOXES[0].numpy(), BOXES.view(2, 4).numpy()], gpuaug.fuse(FLIP)
    with told:
        augment(IMAGES, arrays, data_keys=["input", "bbox_xyxy"])
    padded = torch.nn.utils.rnn.pad_sequence([torch.as_tensor(each) for each in arrays], batch_first=True)
    assert torch.equal(augment(IMAGES, padded, data_keys=["input", "bbox_xyxy"])[1][1], BY_KORNIA.view(2, 4))


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


@example("Use Kornia's names, 'targets' for target dicts")
def unknown_data_key(told):
    augment = gpuaug.fuse(FLIP)
    with told:
        augment(IMAGES, MASK, data_keys=["input", "segmentation"])
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


@example("Leave clips without frames out of the dataset")
def clips_without_frames(told):
    dataset, augment = [IMAGES[:0], IMAGES], gpuaug.fuse(K.RandomHorizontalFlip(p=1.0))
    with told:
        augment(dataset[0][None])
    (clip,) = [clip for clip in dataset if len(clip)]
    torch.testing.assert_close(augment(clip[None])[0], clip.flip(-1) / 255)


@example("Pass the images with the other inputs")
def masks_alone(told):
    augment = gpuaug.fuse(FLIP)
    with told:
        augment(MASK, data_keys=["mask"])
    assert torch.equal(augment(IMAGES, MASK, data_keys=["input", "mask"])[1], MASK.flip(-1))


@example("must hold masks for each of the … images")
def too_few_masks(told):
    augment = gpuaug.fuse(FLIP)
    with told:
        augment(IMAGES, [MASK[0]], data_keys=["input", "mask"])
    _, got = augment(IMAGES, list(MASK), data_keys=["input", "mask"])
    assert torch.equal(got[1], MASK[1].flip(-1))


@example("must hold one entry for each of the … images")
def too_few_boxes(told):
    augment = gpuaug.fuse(FLIP)
    with told:
        augment(IMAGES, BOXES[:1], data_keys=["input", "bbox_xyxy"])
    assert torch.equal(augment(IMAGES, BOXES, data_keys=["input", "bbox_xyxy"])[1], BY_KORNIA)


@example("Pad the samples to one N")
def boxes_of_one_image(told):
    augment = gpuaug.fuse(FLIP)
    with told:
        augment(IMAGES, BOXES.view(2, 4), data_keys=["input", "bbox_xyxy"])
    assert torch.equal(augment(IMAGES, BOXES, data_keys=["input", "bbox_xyxy"])[1], BY_KORNIA)


@example("Pass the masks as a list: list(masks)")
def stacked_masks_of_ragged_images(told):
    images, other = gpuaug.collate_ragged(list(IMAGES)), gpuaug.collate_ragged([IMAGES[0], IMAGES[1, :, :6]])
    augment, masks = gpuaug.fuse(v2.Resize((4, 4)), ragged=True), MASK
    with told:
        augment(other, masks, data_keys=["input", "mask"])
    _, got = augment(images, list(masks), data_keys=["input", "mask"])
    assert got[0].shape == (1, 4, 4)


@example("Resize the mask to that size")
def masks_of_another_size(told):
    augment, small = gpuaug.fuse(FLIP), MASK[..., ::2, ::2]
    with told:
        augment(IMAGES, small, data_keys=["input", "mask"])
    mask = v2.functional.resize(tv_tensors.Mask(small), [8, 8]).as_subclass(torch.Tensor)
    assert torch.equal(augment(IMAGES, mask, data_keys=["input", "mask"])[1], mask.flip(-1))


@example("Name 'valid' once, for one tensor of boxes")
def valid_without_boxes(told):
    augment, valid = gpuaug.fuse(FLIP), torch.ones(2, 1, dtype=torch.bool)
    with told:
        augment(IMAGES, valid, data_keys=["input", "valid"])
    assert torch.equal(augment(IMAGES, BOXES, valid, data_keys=["input", "bbox_xyxy", "valid"])[2], valid)


@example("Mark the boxes that are not padding")
def counts_in_place_of_valid(told):
    augment, counts = gpuaug.fuse(FLIP), torch.tensor([1, 0])
    with told:
        augment(IMAGES, BOXES, counts, data_keys=["input", "bbox_xyxy", "valid"])
    valid = torch.arange(BOXES.shape[1]) < counts[:, None]
    _, _, got = augment(IMAGES, BOXES, valid, data_keys=["input", "bbox_xyxy", "valid"])
    assert got.tolist() == [[True], [False]]


@example("Mixing is not supported beside these")
def mix_beside_boxes(told):
    keys = ["input", "bbox_xyxy"]
    with told:
        gpuaug.fuse([TO_FLOAT, FLIP, v2.MixUp(num_classes=3)])(IMAGES, BOXES, data_keys=keys)
    assert torch.equal(gpuaug.fuse([TO_FLOAT, FLIP])(IMAGES, BOXES, data_keys=keys)[1], BY_KORNIA)


@example("Number the labels: torch.unique(mask, return_inverse=True)[1]")
def masks_of_large_labels(told):
    mask = torch.tensor([2**24 + 1, 7]).repeat(2, 1, 8, 4)
    images = IMAGES.float() / 255
    augment = _left(K.RandomElasticTransform(alpha=(0.0, 0.0), p=1.0))
    with told:
        augment(images, mask, data_keys=["input", "mask"])
    labels = torch.unique(mask, return_inverse=True)[1]
    _, got = augment(images, labels, data_keys=["input", "mask"])
    assert torch.equal(torch.unique(mask)[got.long()], mask)


def _left(module):
    """A pipeline of what is left to its library, without the warning."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gpuaug.GpuAugWarning)
        return gpuaug.fuse(module)


@example("must be fused, or not move pixels")
def boxes_beside_what_is_not_lowered(told):
    keys = ["input", "targets"]
    with told:
        _left([v2.Pad(1, padding_mode="symmetric")])(IMAGES, targets(), data_keys=keys)
    _, got = gpuaug.fuse([v2.Pad(1)])(IMAGES, targets(), data_keys=keys)
    assert torch.equal(got[0]["boxes"], BOXES[0] + 1)


@example("outside of other containers, or mix in the dataset")
def labels_beside_a_mix_that_kornia_runs(told):
    invert, keys = K.RandomInvert(p=1.0), ["input", "class"]
    mixes = [K.RandomMixUpV2((0.5, 0.5), p=1.0), K.RandomCutMixV2(num_mix=1, p=1.0, use_correct_lambda=True)]
    with told:
        _left(K.AugmentationSequential(invert, mixes[0], random_apply=2))(IMAGES, torch.arange(2), data_keys=keys)
    for mix in mixes:
        assert gpuaug.fuse([invert, mix], num_classes=2)(IMAGES, torch.arange(2), data_keys=keys)[1].shape == (2, 2)


@example("Pass its modules in a list, without the container, or run it in the dataset")
def clips_in_a_container_that_kornia_runs(told):
    clips = torch.rand(2, 3, 3, 8, 8)
    container = K.AugmentationSequential(K.RandomInvert(p=1.0), random_apply=1)
    with told:
        _left(container)(clips)
    assert gpuaug.fuse([*container.children()])(clips).shape == clips.shape


@example("Put the module into a separate stage, and the modules after it into another")
def function_that_changes_the_size(told):
    class Halved(torch.nn.Module):
        def forward(self, images):
            return images[..., ::2, ::2]

    with told:
        _left([Halved(), K.RandomHorizontalFlip(p=1.0)])(IMAGES)
    stages = [_left(Halved()), gpuaug.fuse(FLIP)]
    (got,) = gpuaug.StreamedLoader([IMAGES], stages, device="cpu")
    torch.testing.assert_close(got, (IMAGES / 255)[..., ::2, ::2].flip(-1))


@example("class must be a tensor")
def labels_in_a_list(told):
    labels, augment = [0, 1], gpuaug.fuse([TO_FLOAT, v2.MixUp(num_classes=3)])
    with told:
        augment(IMAGES, labels, data_keys=["input", "class"])
    assert augment(IMAGES, torch.tensor(labels), data_keys=["input", "class"])[1].shape == (2, 3)


@example("Pass the class index of each image, or its probabilities")
def labels_of_another_shape(told):
    augment = gpuaug.fuse([TO_FLOAT, v2.MixUp(num_classes=3)])
    with told:
        augment(IMAGES, torch.zeros(2, 5), data_keys=["input", "class"])
    indices = torch.tensor([0, 2])
    for labels in (indices, torch.nn.functional.one_hot(indices, 3)):
        got, mixed = augment(IMAGES, labels, data_keys=["input", "class"])
        share = torch.linalg.lstsq(_columns(IMAGES / 255), (got - IMAGES / 255)[0].reshape(-1, 1)).solution.item()
        assert mixed.dtype is torch.float32
        torch.testing.assert_close(mixed[0], torch.tensor([1 - share, 0, share]), atol=1e-4, rtol=0)


def _columns(images):
    return (images[1] - images[0]).reshape(-1, 1)


@example("For class indices pass num_classes")
def indices_without_num_classes(told):
    labels = torch.tensor([0, 2])
    with told:
        gpuaug.fuse([TO_FLOAT, v2.MixUp()])(IMAGES, labels, data_keys=["input", "class"])
    for augment in (
        gpuaug.fuse([TO_FLOAT, v2.MixUp(num_classes=3)]),
        gpuaug.fuse([TO_FLOAT, v2.MixUp()], num_classes=3),
    ):
        mixed = augment(IMAGES, labels, data_keys=["input", "class"])[1]
        torch.testing.assert_close(mixed.sum(1), torch.ones(2))
    # One-hot labels of whole numbers need none, as in torchvision.
    one_hot = torch.nn.functional.one_hot(labels, 3)
    mixed = gpuaug.fuse([TO_FLOAT, v2.MixUp()])(IMAGES, one_hot, data_keys=["input", "class"])[1]
    assert mixed.dtype is v2.MixUp()(IMAGES / 255, one_hot)[1].dtype


@example("Pass the class index or the class probabilities of each image")
def shares_of_another_batch(told):
    augment = gpuaug.fuse([TO_FLOAT, v2.MixUp()])
    with told:
        augment(IMAGES, torch.ones(3, 4) / 4, data_keys=["input", "class"])
    assert augment(IMAGES, torch.ones(2, 4) / 4, data_keys=["input", "class"])[1].shape == (2, 4)


@example("converts them to one-hot labels")
def one_hot_labels_for_kornia(told):
    labels = torch.tensor([0, 2])
    with told:
        gpuaug.fuse(K.RandomMixUpV2())(IMAGES, torch.nn.functional.one_hot(labels, 3), data_keys=["input", "class"])
    augment = gpuaug.fuse(K.RandomMixUpV2(), num_classes=3)
    torch.testing.assert_close(augment(IMAGES, labels, data_keys=["input", "class"])[1].sum(1), torch.ones(2))


untried("gpuaug.collate_ragged, which makes such batches, refuses these images", "images must have pixels, got … at")
