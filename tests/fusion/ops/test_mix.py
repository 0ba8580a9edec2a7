"""MixUp, CutMix, mosaics and jigsaws, against Kornia on the same draws; and the distributions of draws of mosaics."""

import kornia.augmentation as K
import pytest
import torch
from support.comparison.kornia_draws import kornias, ours
from support.comparison.replay import as_kornia_takes_them, assert_replays, by_kornia, left_to_kornia, photographs
from support.comparison.statistics import apart, related
from support.comparison.values import assert_values

import gpuaug
from gpuaug.fusion.backends import torch_backend
from gpuaug.fusion.ops.mix import CutMix

pytestmark = pytest.mark.filterwarnings("ignore:RandomCutMixV2:DeprecationWarning")

MIXES = {
    "mixup": lambda **o: K.RandomMixUpV2(**o),
    "mixup, bounds": lambda **o: K.RandomMixUpV2(lambda_val=(0.2, 0.4), **o),
    "mixup, tensor": lambda **o: K.RandomMixUpV2(lambda_val=torch.tensor([0.5, 0.5]), **o),
    "cutmix": lambda **o: K.RandomCutMixV2(**o),
    "cutmix, newer labels": lambda **o: K.RandomCutMixV2(use_correct_lambda=True, **o),
    "cutmix, beta": lambda **o: K.RandomCutMixV2(beta=0.3, use_correct_lambda=True, **o),
    "cutmix, beta and bounds": lambda **o: K.RandomCutMixV2(beta=torch.tensor(2.0), cut_size=(0.3, 0.6), **o),
}
OPTIONS = [{"p": 0.0}, {"p": 0.5}, {"p": 1.0}, {"p": 1.0, "same_on_batch": True}]
SHAPES = [(5, 3, 32, 48), (1, 1, 37, 21), (0, 3, 16, 16), (4, 2, 1, 9)]


class HalfMixUp(K.RandomMixUpV2):
    """A class of the user, whose constructor sets a probability per sample."""

    def __init__(self, **options):
        super().__init__(**options)
        self.p = 0.5


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", MIXES)
def test_mixed_images_and_labels_equal_kornia(name, options, dtype):
    mix = MIXES[name](data_keys=["input", "class"], **options)
    pipeline = K.AugmentationSequential(K.RandomHorizontalFlip(), mix, K.Normalize(0.5, 0.25))
    augment = gpuaug.fuse(pipeline)
    for seed, shape in enumerate(SHAPES * 2):
        images, labels = photographs(*shape, dtype=dtype, seed=seed), torch.arange(shape[0]) * 10
        draws = augment.draw(shape, seed=seed)
        got, got_labels = augment(images, labels, data_keys=["input", "class"], draws=draws)
        # Kornia's container takes no labels where it mixes, so its images stand beside the module's own labels.
        expected = pipeline(as_kornia_takes_them(images), params=draws.as_kornia())
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(augment(images, draws=draws), got, atol=0, rtol=0)
        if shape[0] == 0 and isinstance(mix, K.RandomCutMixV2):  # of no samples Kornia's labels are a KeyError
            assert got_labels.shape == (1, 0, 3)
            continue
        _, expected_labels = mix(as_kornia_takes_them(images), labels, params=draws.as_kornia()[1].data)
        assert_values(got_labels, expected_labels)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_mix_takes_labels_of_any_dtype(name, dtype):
    module, labels, keys = MIXES[name](), torch.arange(5).to(dtype), ["input", "class"]
    augment, images = gpuaug.fuse(module), photographs(5, 3, 8, 8, dtype=torch.float32)
    draws = augment.draw(images.shape, seed=0)
    _, got = augment(images, labels, data_keys=keys, draws=draws)
    _, expected = module(images, labels, params=draws.as_kornia(), data_keys=keys)
    assert_values(got, expected)


@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_mix_of_nan_inf_and_out_of_range_values_equals_kornia(name):
    module, images = MIXES[name](), photographs(5, dtype=torch.float32) * 8 - 4
    images[2, :, 3:9, 4:20] = torch.nan
    images[3, 0] = torch.inf
    augment = gpuaug.fuse(module)
    draws = augment.draw(images.shape, seed=0)
    expected = module(images, params=draws.as_kornia())
    torch.testing.assert_close(augment(images, draws=draws), expected, atol=1e-6, rtol=1e-6, equal_nan=True)


@pytest.mark.every(3)
@pytest.mark.parametrize("p_batch", [0.5, 1.0])
@pytest.mark.parametrize("same_on_batch", [False, True])
@pytest.mark.parametrize("name", [*MIXES, "a subclass"])
def test_a_mix_with_a_probability_per_sample_equals_kornia(name, same_on_batch, p_batch):
    make = MIXES.get(name, HalfMixUp)
    module = make(p=p_batch, same_on_batch=same_on_batch)
    module.p = 0.5
    augment, images, labels = gpuaug.fuse(module), photographs(4, dtype=torch.float32), torch.arange(4)
    partly_mixed = 0
    for seed in range(8):
        draws = augment.draw(images.shape, seed=seed, dtype=images.dtype)
        params = draws.as_kornia()
        partly_mixed += len(params["batch_prob"].unique()) == 2
        keys = ["input", "class"]
        got, got_labels = augment(images, labels, draws=draws, data_keys=keys)
        expected, expected_labels = module(images, labels, params=params, data_keys=keys)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
        assert_values(got_labels, expected_labels)
    assert bool(partly_mixed) != same_on_batch


def test_cutmix_with_num_mix_or_several_betas_is_left_to_kornia():
    assert CutMix("mix", K.RandomCutMixV2(num_mix=3)).unsupported() == "num_mix=3"
    assert CutMix("mix", K.RandomCutMixV2(beta=torch.tensor([1.0, 2.0]))).unsupported() == "beta has several values"
    assert CutMix("mix", K.RandomCutMixV2(beta=torch.tensor(2.0))).unsupported() is None


@pytest.mark.parametrize(
    ("keys", "other", "kind", "text"),
    [
        (["input", "mask"], torch.ones(5, 1, 32, 48), gpuaug.ArgumentError, "data_keys must be among input, class with Random"),
        (["input", "bbox_xyxy"], torch.ones(5, 1, 4), gpuaug.ArgumentError, "got bbox_xyxy. Leave RandomMixUpV2_1 out of"),
        (["input", "class"], [0] * 5, gpuaug.ArgumentTypeError, "class must be a tensor, got list. Pass one index for each"),
        (["input", "class"], torch.ones(5, 10), gpuaug.ArgumentError, "class must be one label for each of the 5 images"),
        (["input", "class"], torch.ones(5, device="meta"), gpuaug.DeviceError, "class must be on cpu, .* got meta. Move it"),
    ],
)
def test_mix_refuses_targets_it_cannot_mix(keys, other, kind, text):
    augment = gpuaug.fuse([K.RandomHorizontalFlip(), K.RandomMixUpV2(p=1.0)])
    with pytest.raises(kind, match=text):
        augment(photographs(5), other, data_keys=keys)


def test_jigsaws_never_draw_the_order_of_the_image():
    images = photographs(500, 1, 4, 4, dtype=torch.float32)
    for grid in ((1, 2), (2, 2)):
        got = gpuaug.fuse(K.RandomJigsaw(grid, p=1.0))(images)
        assert (got != images).flatten(1).any(1).all()


def test_mosaics_read_all_images_of_a_large_batch_and_of_their_view(monkeypatch):
    images = photographs(5, dtype=torch.float32)
    monkeypatch.setattr(torch_backend, "MOST_VALUES", 2 * images[0].numel())
    module = K.RandomMosaic(p=1.0)
    augment = gpuaug.fuse(module, views=2)
    draws = augment.draw(images.shape, seed=0)
    assert_values(augment(images, draws=draws), torch.cat([by_kornia(module, images, view) for view in draws.views]))


def test_views_of_a_mosaic_that_may_be_skipped_have_one_size():
    augment = gpuaug.fuse(K.RandomMosaic((9, 7), p=0.5), views=2)
    assert augment(photographs(5)).shape == (10, 3, 9, 7)


@pytest.mark.parametrize("settings", [{}, {"mosaic_grid": (3, 2), "start_ratio_range": (0.1, 0.4)}], ids=str)
def test_draws_of_mosaics_have_kornia_distribution(settings):
    count, module = 2000, K.RandomMosaic(p=0.3, **settings)
    mine, its = ours(module, (count, 3, 24, 40), 0), kornias(module, (count, 3, 24, 40), 1)
    assert {key: (value.shape, value.dtype) for key, value in mine.items()} == {
        key: (value.shape, value.dtype) for key, value in its.items()
    }
    for key in ("dst", "batch_shapes", "forward_input_shape"):
        assert_values(mine[key], its[key])
    assert apart(mine["batch_prob"].numpy(), its["batch_prob"].numpy()) < 1
    images, its_images = mine["permutation"], its["permutation"]
    tiles = images.shape[1] - 1
    for one in (images, its_images):
        assert_values(one[:, 0], torch.arange(count))
        assert_values(one[:, 1:].flatten().bincount(), torch.full((count,), tiles))
    starts = mine["src"][:, 0]
    assert_values(mine["src"] - starts[:, None], its["src"] - its["src"][:, :1])
    drawn = [*images.T[1:].numpy(), *starts.T.numpy()]
    for one, other in zip(drawn, [*its_images.T[1:].numpy(), *its["src"][:, 0].T.numpy()], strict=True):
        assert apart(one, other) < 1
    for index, one in enumerate(drawn):
        assert related(one[1:], one[:-1]) < 1
        assert all(related(one, other) < 1 for other in drawn[:index])


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (K.RandomMosaic(cropping_mode="resample"), "cropping_mode='resample'"),
        (K.RandomMosaic(mosaic_grid=(1, 2)), "start_ratio_range=(0.3, 0.7) reaches beyond the images"),
        (
            K.RandomMosaic((9, 9), start_ratio_range=(-0.5, 0.0)),
            "start_ratio_range=(-0.5, 0.0) reaches beyond the images",
        ),
    ],
)
@left_to_kornia
def test_settings_of_mosaics_left_to_kornia(module, reason):
    assert f"left to Kornia: {reason}" in str(gpuaug.fuse(module).explain())


@left_to_kornia
def test_mosaics_left_to_kornia_have_the_size_of_the_module():
    pipeline = K.AugmentationSequential(K.RandomMosaic((9, 7), p=0.5, cropping_mode="resample"), K.RandomHorizontalFlip())
    assert_replays(pipeline, photographs(5), atol=1e-6)


@left_to_kornia
def test_sides_that_a_grid_does_not_divide_raise_kornias_error():
    augment = gpuaug.fuse(K.RandomJigsaw((2, 3), p=1.0))
    assert "left to Kornia: grid=(2, 3) does not divide the sides" in str(augment.explain((2, 3, 8, 8)))
    with pytest.raises(RuntimeError, match="must be divisible by grid"):
        augment(photographs(2, 3, 8, 8))


@pytest.mark.parametrize("form", [list, tuple, torch.tensor])
def test_output_size_of_a_mosaic_in_every_form(form):
    module = K.RandomMosaic(form([8, 10]), p=1.0)
    images = photographs(4, dtype=torch.float32)
    assert gpuaug.fuse(module)(images).shape == module(images).shape == (4, 3, 8, 10)


@pytest.mark.parametrize("key", ["mask", "bbox_xyxy", "keypoints", "targets", "class"])
@pytest.mark.parametrize("name", ["mosaic", "jigsaw"])
def test_mosaics_and_jigsaws_refuse_targets(name, key):
    images, boxes = photographs(4), torch.rand(4, 1, 4)
    others = {"mask": images[:, :1], "bbox_xyxy": boxes, "keypoints": boxes[..., :2], "targets": [{"boxes": boxes[0]}] * 4}
    module = K.RandomMosaic(p=1.0) if name == "mosaic" else K.RandomJigsaw((2, 3), p=1.0)
    augment, labels = gpuaug.fuse(module), torch.arange(4)
    if (name, key) == ("jigsaw", "class"):
        assert_values(augment(images, labels, data_keys=["input", "class"])[1], labels)
        return
    text = f"data_keys must be among input.* with Random.*, got {key}. Leave Random.* out of the pipeline."
    with pytest.raises(gpuaug.ArgumentError, match=text):
        augment(images, {**others, "class": labels}[key], data_keys=["input", key])
