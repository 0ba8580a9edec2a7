"""Labels as shares of the classes: counted in the images that they go with, and compared with timm and with torch's losses."""

import kornia.augmentation as K
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.comparison.replay import left_to_kornia, photographs
from support.comparison.values import assert_values
from torch.nn.functional import cross_entropy, one_hot

import gpuaug

pytestmark = pytest.mark.filterwarnings("ignore:RandomCutMixV2:DeprecationWarning")

KEYS = ["input", "class"]
CLASSES = 7
PIPELINES = {
    "mixup": lambda: K.RandomMixUpV2(),
    "mixup, same": lambda: K.RandomMixUpV2(same_on_batch=True),
    "cutmix, area": lambda: K.RandomCutMixV2(),
    "cutmix, rest": lambda: K.RandomCutMixV2(use_correct_lambda=True),
    "either": lambda: K.AugmentationSequential(K.RandomMixUpV2(), K.RandomCutMixV2(p=0.7), random_apply=1),
    "mixup, cutmix": lambda: [K.RandomMixUpV2(), K.RandomHorizontalFlip(), K.RandomCutMixV2(use_correct_lambda=True)],
    "cutmix, mixup": lambda: [K.RandomCutMixV2(), K.RandomMixUpV2(p=0.5), K.RandomMixUpV2()],
    "cutmix, equalize, mixup": lambda: [K.RandomCutMixV2(), K.RandomMedianBlur(7, p=0.0), K.RandomMixUpV2()],
    "none": lambda: K.RandomHorizontalFlip(),
}


def whose(batch, height=9, width=16):
    """Images with a channel for each sample of the batch, which says how much of a pixel is that sample's."""
    return torch.eye(batch)[:, :, None, None].repeat(1, 1, height, width)


def smoothed(labels, smoothing):
    return one_hot(labels, CLASSES) * (1 - smoothing) + smoothing / CLASSES


@pytest.mark.parametrize("name", PIPELINES)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(st.sampled_from(["batch", "sample"]), st.sampled_from([0.0, 0.1]), st.integers(1, 6), st.integers(0, 10**6))
@left_to_kornia
def test_soft_labels_weigh_classes_as_their_images_are_mixed(name, pick, smoothing, batch, seed):
    augment = gpuaug.fuse(PIPELINES[name](), pick=pick, num_classes=CLASSES, label_smoothing=smoothing)
    images, labels = whose(batch), torch.randint(0, CLASSES, (batch,), generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    mixed, got = augment(images, labels, data_keys=KEYS)
    assert got.shape == (batch, CLASSES)
    assert got.dtype is torch.float32
    expected = mixed.mean((2, 3)) @ smoothed(labels, smoothing)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_soft_labels_equal_timm_mixup_target(smoothing):
    from timm.data.mixup import mixup_target

    augment = gpuaug.fuse(K.RandomMixUpV2(lambda_val=(0.3, 0.3)), num_classes=CLASSES, label_smoothing=smoothing)
    images, labels = photographs(4), torch.tensor([0, 6, 2, 6])
    # timm's partner is the sample in the place counted from the other end.
    draws = next(
        draws
        for draws in (augment.draw(images.shape, seed=seed) for seed in range(1000))
        if draws.as_kornia()["mixup_pairs"].tolist() == [3, 2, 1, 0]
    )
    got = augment(images, labels, data_keys=KEYS, draws=draws)[1]
    torch.testing.assert_close(got, mixup_target(labels, CLASSES, 0.7, smoothing))
    off = gpuaug.fuse(K.RandomMixUpV2(p=0.0), num_classes=CLASSES, label_smoothing=smoothing)
    assert_values(off(images, labels, data_keys=KEYS)[1], mixup_target(labels, CLASSES, 1.0, smoothing))


@pytest.mark.parametrize("name", ["none", "never", "never one of"])
def test_unmixed_soft_labels_give_torch_label_smoothing_loss(name):
    never = K.RandomMixUpV2(p=0.0), K.RandomCutMixV2(p=0.0)
    made = {
        "none": lambda: K.RandomHorizontalFlip(),
        "never": lambda: [*never],
        "never one of": lambda: K.AugmentationSequential(*never, random_apply=1),
    }
    augment = gpuaug.fuse(made[name](), num_classes=CLASSES, label_smoothing=0.2)
    labels, logits = torch.tensor([0, 3, 6, 3]), torch.randn(4, CLASSES)
    _, soft = augment(photographs(4), labels, data_keys=KEYS)
    torch.testing.assert_close(cross_entropy(logits, soft), cross_entropy(logits, labels, label_smoothing=0.2))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float16], ids=str)
def test_soft_labels_of_indices_of_any_dtype(dtype):
    labels = torch.tensor([0, 1, 1, 0])
    augment = gpuaug.fuse(K.RandomHorizontalFlip(), num_classes=2)
    got = augment(photographs(4), labels.to(dtype), data_keys=KEYS)[1]
    assert_values(got, one_hot(labels).float())


def test_index_out_of_num_classes_has_no_class_in_its_row():
    labels = torch.tensor([-100, 255, 2, CLASSES])
    for smoothing in (0.0, 0.1):
        augment = gpuaug.fuse(K.RandomMixUpV2(), num_classes=CLASSES, label_smoothing=smoothing)
        draws = augment.draw((4, 3, 8, 8), seed=0)
        params = draws.as_kornia()
        got = augment(photographs(4, 3, 8, 8), labels, data_keys=KEYS, draws=draws)[1]
        expected = torch.full((4, CLASSES), smoothing / CLASSES)
        for sample, (partner, share) in enumerate(zip(params["mixup_pairs"], params["mixup_lambdas"], strict=True)):
            expected[sample, 2] += (1 - smoothing) * ((sample == 2) * (1 - share) + (partner == 2) * share)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["mixup", "none", "mixup, cutmix"])
def test_label_probabilities_are_smoothed_and_keep_their_dtype(name, dtype):
    images, given_shares = whose(4), torch.rand(4, CLASSES).softmax(1).to(dtype)
    augment = gpuaug.fuse(PIPELINES[name](), num_classes=CLASSES, label_smoothing=0.1)
    mixed, got = augment(images, given_shares, data_keys=KEYS)
    assert got.dtype is dtype
    expected = mixed.mean((2, 3)) @ (given_shares.float() * 0.9 + 0.1 / CLASSES)
    torch.testing.assert_close(got.float(), expected, atol=8e-3 if dtype is torch.bfloat16 else 2e-6, rtol=0)
    unchanged = gpuaug.fuse(K.RandomMixUpV2(p=0.0), num_classes=CLASSES)(images, given_shares, data_keys=KEYS)[1]
    assert_values(unchanged, given_shares)


def test_soft_labels_of_an_empty_batch_and_a_single_image():
    for name in ("mixup", "none"):
        augment = gpuaug.fuse(PIPELINES[name](), num_classes=3)
        empty = torch.zeros(0, 3, 8, 8), torch.zeros(0, dtype=torch.int64)
        assert augment(*empty, data_keys=KEYS)[1].shape == (0, 3)
        assert augment(torch.zeros(3, 8, 8), torch.tensor([2]), data_keys=KEYS)[1].tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("name", ["mixup", "none"])
@pytest.mark.parametrize(
    ("labels", "kind", "text"),
    [
        ([0] * 5, gpuaug.ArgumentTypeError, "class must be a tensor, got list. Pass one index for each image"),
        (torch.zeros(4), gpuaug.ArgumentError, r"class must be \(5,\) or \(5, 7\), got \(4,\)"),
        (torch.zeros(5, 8), gpuaug.ArgumentError, r"got \(5, 8\). Pass the class index of each image, or its probab"),
        (
            torch.zeros(5, device="meta"),
            gpuaug.DeviceError,
            "class must be on cpu, where the images are, got meta. Move it to that device.",
        ),
    ],
)
def test_bad_labels_are_refused_with_num_classes(name, labels, kind, text):
    augment = gpuaug.fuse(PIPELINES[name](), num_classes=CLASSES)
    with pytest.raises(kind, match=text):
        augment(photographs(5), labels, data_keys=KEYS)


def test_labels_keep_their_form_without_num_classes():
    images, labels = photographs(5), torch.arange(5)
    assert gpuaug.fuse(PIPELINES["mixup"]())(images, labels, data_keys=KEYS)[1].shape == (5, 3)
    assert gpuaug.fuse(PIPELINES["cutmix, rest"]())(images, labels, data_keys=KEYS)[1].shape == (1, 5, 3)
    assert gpuaug.fuse(PIPELINES["none"]())(images, labels, data_keys=KEYS)[1] is labels
    # Without labels, num_classes asks for nothing.
    assert gpuaug.fuse(PIPELINES["mixup"](), num_classes=3)(images).shape == images.shape
