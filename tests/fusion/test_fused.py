"""What ``fuse`` takes, leaves to Kornia, and leaves alone."""

import contextlib
import copy
import pickle
import random
import threading

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from support import internals
from support.comparison.replay import as_kornia_takes_them, assert_replays, left_to_kornia, photographs
from support.comparison.values import assert_values
from support.ops.other_arguments import KORNIA, TORCHVISION
from support.ops.other_arguments import made as changeable
from support.profiler import tables
from torch import nn
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug
from gpuaug.core import batch as batches
from gpuaug.fusion.lower import torchvision
from gpuaug.fusion.policies.auto_augment import POLICIES
from gpuaug.fusion.program import program

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def pipeline():
    return K.AugmentationSequential(
        K.RandomResizedCrop((16, 20)),
        K.RandomHorizontalFlip(),
        K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8),
        K.Normalize(MEAN, STD),
    )


@pytest.mark.parametrize(
    "made",
    [
        pipeline(),
        K.ImageSequential(K.RandomHorizontalFlip(), K.RandomInvert()),
        K.RandomVerticalFlip(),
        [K.RandomHorizontalFlip(), K.RandomInvert()],
        torch.nn.Sequential(K.RandomHorizontalFlip(), K.RandomInvert()),
        K.AugmentationSequential(K.ImageSequential(K.RandomHorizontalFlip(), K.RandomInvert()), K.RandomVerticalFlip()),
    ],
    ids=["container", "image container", "one", "list", "sequential", "nested"],
)
def test_every_kind_of_pipeline_replays_in_kornia(made):
    images = photographs()
    augment = gpuaug.fuse(made)
    draws = augment.draw(images.shape, seed=3)
    params, expected = draws.as_kornia(), as_kornia_takes_them(images)
    if isinstance(made, list | torch.nn.Sequential) and not isinstance(made, K.ImageSequential):
        for module, each in zip(made, params, strict=True):
            expected = module(expected, params=each)
    else:
        expected = made(expected, params=params)
    torch.testing.assert_close(augment(images, draws=draws), expected, atol=5e-5 / 0.22, rtol=0)


def test_fused_module_has_no_state():
    augment = gpuaug.fuse(pipeline())
    assert augment.state_dict() == {}
    assert list(augment.parameters()) == list(augment.modules())[1:] == []
    images = photographs()
    draws = augment.draw(images.shape, seed=1)
    trained = augment(images, draws=draws)
    assert_values(augment.eval()(images, draws=draws), trained)
    assert_values(copy.deepcopy(augment)(images, draws=draws), trained)
    assert_values(pickle.loads(pickle.dumps(augment))(images, draws=draws), trained)


def test_fuse_does_not_modify_the_pipeline():
    made = pipeline()
    before = repr(made), [copy.deepcopy(module._params) for module in made]
    gpuaug.fuse(made)(photographs())
    assert (repr(made), [module._params for module in made]) == before


class Doubled(K.RandomInvert):
    def apply_transform(self, input, params, flags, transform=None):  # noqa: A002 (Kornia's name)
        return input * 2


class Halved(torch.nn.Module):
    def forward(self, images):
        return images * 0.5


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (K.RandomThinPlateSpline(), "no lowering for this type"),
        (Doubled(), "a subclass of RandomInvert that overrides apply_transform"),
        (Halved(), "not one of Kornia's modules"),
        (K.RandomCrop((8, 8), p=0.5), "with p=0.5 the size of the output depends on the draw"),
        (K.RandomResizedCrop((8, 8), resample="bicubic"), "resample='bicubic'"),
        (K.Resize((8, 8), antialias=True), "antialias=True"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@left_to_kornia
def test_unknown_modules_run_in_kornia_in_their_place(module, reason):
    made = K.AugmentationSequential(K.RandomHorizontalFlip(), module, K.RandomVerticalFlip())
    images = photographs()
    for seed in range(3):
        assert_replays(made, images, seed)
    text = str(gpuaug.fuse(made).explain(images.shape))
    assert f"left to Kornia: {reason}" in text


@left_to_kornia
def test_modules_left_to_kornia_draw_by_key_and_leave_global_generators_alone():
    augment, images = gpuaug.fuse([K.RandomElasticTransform(p=1.0), torch.nn.Dropout(0.5)]), photographs()
    torch.manual_seed(1)
    torch.randint(0, 2**63 - 1, ())
    expected = torch.rand(1)
    torch.manual_seed(1)
    first = augment(images)
    assert_values(torch.rand(1), expected)
    torch.manual_seed(1)
    assert_values(augment(images), first)


class Drawing(torch.nn.Module):
    """A user's module that draws from all generators that a program has."""

    def forward(self, images):
        return images * random.random() * np.random.rand() * torch.rand(())


class DrawingImages(v2.Transform):
    def transform(self, image, params):
        return image * random.random() * np.random.rand() * torch.rand(())


@left_to_kornia
@pytest.mark.parametrize(
    "pipeline_of",
    [
        lambda: [Drawing(), K.RandomHorizontalFlip()],
        lambda: K.AugmentationSequential(K.RandomHorizontalFlip(), Drawing()),
        lambda: K.AugmentationSequential(K.ImageSequential(Drawing(), K.RandomMedianBlur(7), random_apply=1)),
        lambda: DrawingImages(),
        lambda: v2.Compose([v2.RandomInvert(), v2.Lambda(lambda image: image * random.random())]),
        lambda: v2.RandomOrder([DrawingImages(), v2.GaussianNoise()]),
    ],
)
def test_modules_of_the_user_are_keyed_in_all_libraries_outside_of_a_loader(pipeline_of):
    """A seed and draws decide what they draw, and the generators of the program go on as if there had been no call."""
    augment, images = gpuaug.fuse(pipeline_of()), photographs(3, dtype=torch.float32)
    draws = augment.draw(images.shape, seed=1, dtype=images.dtype)
    assert_values(augment(images, draws=draws), augment(images, draws=draws))
    random.seed(5)
    np.random.seed(5)
    numbers = random.random(), np.random.rand()
    for seed in (5, 6):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(0)
        got = augment(images)
        assert (numbers == (random.random(), np.random.rand())) is (seed == 5)
        torch.manual_seed(0)
        assert_values(augment(images), got)
    torch.manual_seed(1)
    assert not torch.equal(augment(images), got)


@left_to_kornia
def test_explain_lists_launches_and_bytes_of_each_module():
    made = gpuaug.fuse(
        [K.RandomResizedCrop((224, 224)), K.ColorJitter(0.4, 0.4, 0.4), K.RandomThinPlateSpline(), K.RandomRotation(10.0)],
        dtype=torch.bfloat16,
    ).explain((64, 3, 256, 256))
    first, eager, last = made.lines
    assert (first.launches, first.read_bytes, first.written_bytes) == (2, 64 * 3 * 256 * 256, 4 * 64 * 3 * 224 * 224)
    assert (last.launches, last.read_bytes, last.written_bytes) == (1, 4 * 64 * 3 * 224 * 224, 2 * 64 * 3 * 224 * 224)
    assert eager.launches is made.launches is None
    assert "left to Kornia: no lowering for this type" in str(made)
    assert "RandomResizedCrop_0, ColorJitter_1" in str(made)


@pytest.mark.parametrize(("dtype", "between"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_explain_counts_the_bytes_between_passes(dtype, between):
    modules = [K.CenterCrop(24), K.RandomGaussianBlur((3, 3), (0.1, 2.0)), K.Normalize(0.5, 0.25)]
    first, last = gpuaug.fuse(modules, dtype=dtype).explain((2, 3, 32, 32)).lines
    values = 2 * 3 * 24 * 24
    assert (first.written_bytes, last.read_bytes, last.written_bytes) == (
        between * values,
        between * values,
        dtype.itemsize * values,
    )


@left_to_kornia
def test_notebook_shows_what_explain_says_as_a_table():
    explained = gpuaug.fuse([K.RandomHorizontalFlip(), K.RandomMedianBlur(7), K.RandomResizedCrop((8, 8))]).explain(
        (4, 3, 64, 64)
    )
    (heading, *rows), (head, *notes) = tables.read(explained._repr_html_())
    text = str(explained).splitlines()
    assert [head, *notes] == [text[0], *text[5:]]
    assert [" ".join(row).split() for row in [heading, *rows]] == [line.split() for line in text[1:5]]


def test_explain_and_repr_name_the_backend_of_the_last_call():
    augment = gpuaug.fuse(K.RandomInvert())
    assert "run by" not in str(augment.explain()) + repr(augment)
    augment(photographs(2))
    assert str(augment.explain()).startswith("images (2, 3, 32, 48), uint8; run by torch\n")
    assert repr(augment) == "Fused(RandomInvert; run by torch)"


def test_keepdim_returns_a_single_image():
    image = photographs(1)[0]
    assert gpuaug.fuse(K.RandomHorizontalFlip(keepdim=True))(image).shape == image.shape
    assert gpuaug.fuse(K.RandomHorizontalFlip())(image).shape == (1, *image.shape)
    flip = v2.RandomHorizontalFlip()
    flip.keepdim = False  # means nothing to torchvision
    assert gpuaug.fuse(flip)(image).shape == image.shape


@pytest.mark.parametrize("made", [K.RandomGrayscale(p=1.0), K.RandomHorizontalFlip(p=0.0), K.RandomMixUpV2(p=1.0)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_output_has_the_memory_format_asked_for(made, memory_format):
    images = photographs(4, 3, 8, 10, dtype=torch.float32).transpose(2, 3)
    got = gpuaug.fuse(made, memory_format=memory_format)(images)
    assert got.is_contiguous(memory_format=memory_format)
    got.add_(1)  # no two pixels share their memory


CHANNELS = torch.tensor([1.0, 0.5, 0.25]).view(3, 1, 1)
OF_OTHER_SIZES = [
    K.PadTo((11, 9), pad_mode="replicate"),
    K.PadTo((16, 25), pad_mode="circular"),
    K.PadTo((7, 25), pad_mode="circular"),
    K.CenterCrop(8, p=0.0),
    K.CenterCrop(8, cropping_mode="resample"),
    K.RandomCrop((5, 7), cropping_mode="resample"),
    K.RandomCrop((12, 7)),
    K.RandomResizedCrop((5, 7), cropping_mode="resample"),
    K.RandomResizedCrop((5, 7), resample="bicubic"),
    K.Resize((5, 7), antialias=True),
    K.Resize((0, 4)),
    K.RandomInvert(CHANNELS, p=1.0),
    K.RandomInvert(CHANNELS, p=0.0),
    K.RandomInvert(CHANNELS.flatten(), p=1.0),
]


@pytest.mark.parametrize("shape", [(2, 3, 11, 22), (2, 1, 11, 22), (0, 3, 11, 22)], ids=str)
@pytest.mark.parametrize("first", OF_OTHER_SIZES, ids=repr)
@left_to_kornia
def test_unsupported_sizes_have_kornias_output_size(first, shape):
    images = photographs(*shape, dtype=torch.float32)
    for modules in ([first], [first, K.RandomHorizontalFlip(p=1.0)]):
        pipeline = K.AugmentationSequential(*modules)
        try:
            expected = pipeline(images)
        except Exception as error:
            with pytest.raises(type(error)):
                gpuaug.fuse(pipeline)(images)
        else:
            augment = gpuaug.fuse(pipeline)
            assert augment(images).shape == expected.shape
            draws = augment.draw(images.shape, seed=1)
            expected = pipeline(images, params=draws.as_kornia())
            torch.testing.assert_close(augment(images, draws=draws), expected, atol=5e-5, rtol=0)


@left_to_kornia
def test_last_module_may_have_any_output_size():
    augment = gpuaug.fuse([K.RandomHorizontalFlip(p=1.0), torch.nn.Upsample(scale_factor=2)], dtype=torch.float16)
    assert augment(photographs(2, 3, 8, 9)).shape == (2, 3, 16, 18)


def test_copies_keep_training_mode():
    augment = gpuaug.fuse(K.RandomHorizontalFlip()).eval()
    for again in (copy.deepcopy(augment), pickle.loads(pickle.dumps(augment))):
        assert not again.training
    assert copy.deepcopy(augment.train()).training


def test_calls_that_differ_from_a_known_one_are_looked_at_again():
    augment, images = gpuaug.fuse(pipeline()), photographs(4)
    augment(images)
    augment(photographs(3, 3, 30, 50))
    assert augment.explain().shape == (3, 3, 30, 50)
    assert augment(images).shape == (4, 3, 16, 20)
    assert augment.explain().shape == images.shape
    assert augment(images[0]).shape == (1, 3, 16, 20)
    assert type(augment(tv_tensors.Image(images))) is tv_tensors.Image
    assert len(augment(images, torch.arange(4), data_keys=["input", "class"])) == 2
    floats = images / 255
    augment(floats)
    with pytest.raises(gpuaug.ArgumentError, match="must not require gradients"):
        augment(floats.requires_grad_())
    with pytest.raises(gpuaug.ArgumentTypeError, match=r"images must be uint8, uint16, int16 or floating .* got torch\.int64"):
        augment(images.long())


def test_targets_that_require_gradients_are_transformed_without():
    augment = gpuaug.fuse(K.AugmentationSequential(K.RandomHorizontalFlip(), K.RandomRotation(20.0)))
    values = {"bbox_xyxy": torch.rand(2, 3, 4), "keypoints": torch.rand(2, 3, 2), "mask": torch.rand(2, 1, 16, 16)}
    dicts = [{key: torch.rand(size).requires_grad_() for key, size in (("boxes", (3, 4)), ("keypoints", (3, 2)))}] * 2
    for key, value in {**values, "targets": dicts}.items():
        value = dicts if key == "targets" else value.requires_grad_()
        _, moved = augment(torch.rand(2, 3, 16, 16), value, data_keys=["input", key])
        assert {tensor.requires_grad for tensor in batches.tensors(moved)} == {False}


def test_kinds_of_images_are_forgotten_where_there_are_many():
    augment = gpuaug.fuse(K.RandomHorizontalFlip())
    for width in range(1, 2 * program.MOST_CACHED):
        augment(torch.zeros(1, 3, 2, width))
    assert len(internals.program(augment).cached) <= program.MOST_CACHED


CHANGED = [kind for kind in (*KORNIA, *TORCHVISION) if kind not in (*POLICIES, v2.RandomIoUCrop)]
SOME_CHANGED = [pytest.param(kind, marks=pytest.mark.slow if number % 3 else ()) for number, kind in enumerate(CHANGED)]


def outputs(augment, kind):
    """Images by the draws of a seed, of each type that the pipeline takes."""
    made = {}
    height, width = (4, 4) if kind is v2.LinearTransformation else (12, 16)
    for dtype in (torch.uint8,) if kind is v2.JPEG else (torch.uint8, torch.float32, torch.float16):
        images = photographs(3, height=height, width=width, dtype=torch.float32)
        images = images.mul(255).to(dtype) if dtype == torch.uint8 else images.to(dtype)
        images = images[:, None].repeat(1, 4, 1, 1, 1) if kind is v2.UniformTemporalSubsample else images
        with contextlib.suppress(gpuaug.GpuAugError):
            made[dtype] = augment(images, draws=augment.draw(images.shape, seed=3, dtype=dtype))
    return made


def destroyed(module):
    """Replace all attributes of a module, and empty those that can be changed in place."""
    for name in vars(module).keys() - vars(torch.nn.Module()).keys():
        if isinstance(vars(module)[name], dict | list):
            vars(module)[name].clear()
        vars(module)[name] = object()
    module._modules.clear()
    module._parameters.clear()
    module._buffers.clear()


@left_to_kornia
@pytest.mark.parametrize("kind", SOME_CHANGED, ids=lambda kind: f"{kind.__module__[:6]} {kind.__name__}")
def test_settings_are_those_at_fuse_for_every_type_and_for_copies(kind):
    """Whether they are changed before or after the first batch of a type."""
    draws_size = getattr(torchvision.LOWERED.get(kind), "draws_size", False)
    module, rest = changeable(kind), [v2.Resize((8, 8))] if draws_size else []
    expected, augment = outputs(gpuaug.fuse([module, *rest]), kind), gpuaug.fuse([module, *rest])
    destroyed(module)
    assert expected
    for fused in (augment, pickle.loads(pickle.dumps(augment))):
        got = outputs(fused, kind)
        assert got.keys() == expected.keys()
        for dtype in got:
            assert_values(got[dtype], expected[dtype], about=str(dtype))


def test_members_of_containers_are_those_at_fuse():
    images = photographs(2, dtype=torch.float16)
    lists = [[K.RandomInvert(p=1.0)], K.AugmentationSequential(K.RandomInvert(p=1.0)), v2.Compose([v2.RandomInvert(1.0)])]
    for container in lists:
        augment = gpuaug.fuse(container)
        expected = augment(images)
        (getattr(container, "transforms", container)).append(
            K.RandomHorizontalFlip(p=1.0) if container is not lists[2] else v2.Pad(1)
        )
        for fused in (gpuaug.fuse(container), augment):
            assert (fused(images).shape == expected.shape and torch.equal(fused(images), expected)) is (fused is augment)


class Strength(torch.nn.Module):
    """A user's module with a setting that a training loop changes, and an attribute that cannot be copied."""

    def __init__(self):
        super().__init__()
        self.strength, self.lock = 1.0, threading.Lock()

    def forward(self, images):
        return images * self.strength


class Locked(K.RandomInvert):
    """Fused as its base, and impossible to copy."""

    def __init__(self):
        super().__init__(p=1.0)
        self.lock = threading.Lock()


@left_to_kornia
def test_modules_of_the_user_and_those_that_cannot_be_copied_are_called_as_they_are():
    images, user, invert = photographs(2, dtype=torch.float32), Strength(), K.RandomInvert(p=1.0)
    calls = v2.Lambda(user)
    for members in (
        K.AugmentationSequential(Locked(), user, invert),
        [Locked(), K.ImageSequential(user), invert],
        [invert, calls],
    ):
        augment = gpuaug.fuse(members)
        user.strength, invert.p = 0.5, 0.0
        expected = 1 - 0.5 * (1 - images) if members[-1] is invert else 0.5 * (1 - images)
        assert_values(augment(images), expected, atol=1e-6)
        user.strength, invert.p = 1.0, 1.0


def test_the_parameters_of_the_last_call_of_a_module_are_not_copied():
    module = K.RandomGaussianNoise(p=1.0)
    module(photographs(4, dtype=torch.float32))
    (copied,) = gpuaug.fuse(module).pipeline
    assert copied is not module
    assert copied._params is module._params


# Refusals


HELD = (K.RandomHorizontalFlip(p=1.0), v2.RandomInvert(1.0), K.AugmentationSequential(K.RandomVerticalFlip(p=1.0)))


@pytest.mark.parametrize("holder", [nn.ModuleList, nn.Sequential, list, tuple])
def test_modules_in_any_sequence_run_in_order(holder):
    images = torch.rand(2, 3, 4, 5)
    pipeline = holder(*[HELD] if holder is not nn.Sequential else HELD)
    for nested in (pipeline, [pipeline], nn.ModuleList([pipeline]) if isinstance(pipeline, nn.Module) else (pipeline,)):
        torch.testing.assert_close(gpuaug.fuse(nested)(images), 1 - images.flip(-1, -2))


class Empty(nn.Module):
    """A module of the user without ``forward``."""


@pytest.mark.parametrize(
    "module", [nn.ModuleDict({"flip": HELD[0]}), nn.ParameterList(), Empty()], ids=lambda m: type(m).__name__
)
def test_modules_without_forward_are_refused_by_fuse(module):
    for pipeline in (module, [module], nn.Sequential(HELD[0], module), K.AugmentationSequential(module)):
        with pytest.raises(gpuaug.ArgumentTypeError, match=f"got {type(module).__name__}, which has no forward"):
            gpuaug.fuse(pipeline)


def test_a_sequence_that_can_be_called_is_a_transform_of_its_own():
    class Own(list):
        def __call__(self, image):
            return 255 - image

    images = torch.arange(48, dtype=torch.uint8).view(1, 3, 4, 4)
    with pytest.warns(gpuaug.GpuAugWarning, match="Own_0 is not fused"):
        augment = gpuaug.fuse(v2.Compose([Own([v2.RandomHorizontalFlip(1.0)])]))
    torch.testing.assert_close(augment(images), 255 - images)


@left_to_kornia
@pytest.mark.parametrize(
    ("module", "shape", "note"),
    [
        (K.RandomSharpness(p=1.0), (2, 3, 2, 8), "RandomSharpness_0: the image has no 3x3 pixels."),
        (K.CenterCrop(9), (2, 3, 8, 8), "CenterCrop_0: crops 9x9 out of 8x8."),
    ],
)
def test_errors_of_kornia_name_the_module_and_why_kornia_runs_it(module, shape, note):
    with pytest.raises(Exception) as caught:  # noqa: PT011 of Kornia's own type
        gpuaug.fuse([module])(torch.zeros(shape))
    (found,) = caught.value.__notes__
    assert found.startswith(f"gpuaug: raised by Kornia, which runs {note}")


@pytest.mark.parametrize(("key", "shape"), [("mask", (2, 1, 4, 4)), ("bbox_xyxy", (2, 5, 4))])
def test_targets_on_another_device_are_refused(key, shape):
    with pytest.raises(
        gpuaug.DeviceError, match=f"{key} must be on cpu, where the images are, got meta. Move it to that device."
    ):
        gpuaug.fuse(K.RandomInvert())(torch.zeros(2, 3, 4, 4), torch.zeros(shape, device="meta"), data_keys=["input", key])
