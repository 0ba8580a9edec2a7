"""What is shown is what the training loop will get, of the same samples, and with what they drew."""

import copy
import sys
import warnings
from collections import namedtuple

import kornia.augmentation as K
import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import processes
from support.viewer import above, beneath, beside, channels_first, loader, notes, of, pixels, texts
from torch.utils.data import DataLoader, Subset

import gpuaug
from gpuaug import ArgumentError, ArgumentTypeError, FeatureStage, StreamedLoader, TransformStage
from gpuaug.core.ragged import Ragged, Shapes

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
Sample = namedtuple("Sample", ("mask", "image"))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def shown(images, mean=0.0, std=1.0):
    """Images as they should be drawn."""
    mean, std = (torch.as_tensor(value).reshape(-1, 1, 1) for value in (mean, std))
    return (images.cpu().float() * std + mean).clamp(0, 1)


def check(figure, *lines):
    """The pictures are those of ``lines``, bit for bit."""
    expected = [picture for line in lines for picture in line]
    assert len(figure.axes) == len(expected)
    for got, wanted in zip(pixels(figure), expected, strict=True):
        assert torch.equal(channels_first(got), wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pictures_are_those_of_the_next_batch(device, dtype):
    augment = gpuaug.fuse(
        K.AugmentationSequential(
            K.RandomResizedCrop((10, 8)), K.RandomHorizontalFlip(), K.ColorJitter(0.4, 0.4, 0.4, 0.1), K.Normalize(MEAN, STD)
        ),
        dtype=dtype,
        memory_format=torch.channels_last,
    )
    streamed = loader([augment], shuffle=True, device=device)
    for _ in range(2):
        figure = gpuaug.show(streamed, n=3)
        images, labels = next(iter(streamed))
        sources = torch.stack([streamed.dataset.images[label] for label in labels])
        check(figure, shown(sources / 255)[:3], shown(images, MEAN, STD)[:3])
    assert beside(figure) == ["before", "after"]
    assert notes(figure) == ["12x12", "8x10"]


@given(st.integers(0, 50), st.integers(0, 5))
@settings(max_examples=8)
def test_draws_beneath_are_those_of_the_pictures(seed, epoch):
    crop = gpuaug.fuse(K.AugmentationSequential(K.RandomCrop((5, 6)), K.RandomHorizontalFlip(), K.RandomInvert(p=0.3)))
    streamed = loader([lambda images: images, TransformStage(crop, name="crop")], seed=seed)
    streamed.set_epoch(epoch)
    figure = gpuaug.show(streamed, n=4)
    assert texts(figure)[0] == f"4 of 4 samples in batch 0 of epoch {epoch}, through transform, crop"
    pictures = [channels_first(each) for each in pixels(figure)]
    for before, after, said in zip(pictures[:4], pictures[4:], beneath(figure), strict=True):
        first, *rest = said.split("\n")
        x, y = map(int, first.removeprefix("Crop at ").split(", "))
        expected = before[:, y : y + 5, x : x + 6]
        expected = expected.flip(-1) if "HorizontalFlip" in rest else expected
        assert torch.equal(after, 1 - expected if "Invert" in rest else expected)
        assert set(rest) <= {"HorizontalFlip", "Invert"}


def test_two_fused_stages_have_their_own_draws_in_order():
    turn, erase = gpuaug.fuse(K.RandomRotation(30.0, p=1.0)), gpuaug.fuse(K.RandomErasing(p=1.0))
    streamed = loader([TransformStage(turn, name="turn"), TransformStage(erase, name="erase")])
    figure = gpuaug.show(streamed, n=2)
    for index, said in enumerate(beneath(figure)):
        # The seed of each is that of its own name.
        position = gpuaug.core.rng.Position(3, 0, 0, 0)
        degrees = turn.draw((4, 3, 12, 12), position.key("turn/1")).of(index)["RandomRotation"]["degrees"]
        drawn = erase.draw((4, 3, 12, 12), position.key("erase/1")).of(index)["RandomErasing"]
        width, height, x, y = (round(drawn[name]) for name in ("widths", "heights", "xs", "ys"))
        assert said == f"Rotation {degrees:.1f}°\nErasing {width}x{height} at {x}, {y}"
    check(figure, *(torch.stack(each) for each in ([shown(streamed.dataset.images[i] / 255) for i in range(2)],)),
          shown(next(iter(streamed))[0])[:2])  # fmt: skip


def test_a_sample_that_nothing_was_drawn_for_says_so():
    assert beneath(gpuaug.show(loader([gpuaug.fuse(K.RandomInvert(p=0.0))]), n=1)) == ["as it was"]
    assert beneath(gpuaug.show(loader([lambda images: images]), n=1)) == []


def test_what_a_stage_does_to_its_input_is_not_seen_before_it():
    def invert(images):
        return images.mul_(-1).add_(255)

    sources = torch.randint(0, 256, (2, 3, 6, 6), dtype=torch.uint8)
    figure = gpuaug.show(of(sources.clone(), invert))
    check(figure, shown(sources / 255), shown((255 - sources) / 255))


def test_samples_are_as_many_as_asked_for_or_as_there_are():
    streamed = loader()
    for n, count in ((1, 1), (4, 4), (9, 4), (np.int64(2), 2)):
        figure = gpuaug.show(streamed, n=n)
        assert len(figure.axes) == count
        assert texts(figure)[0] == f"{count} of 4 samples in batch 0 of epoch 0"
    assert beside(figure) == ["as loaded"]
    assert len(gpuaug.show(loader(count=16, batch=16), n=16).axes) == 16
    assert len(gpuaug.show(loader(count=16, batch=16)).axes) == 8


@pytest.mark.parametrize("normalize", ["kornia", "fused", "within", "twice", "undone"])
def test_normalising_is_undone_wherever_it_is_known(normalize):
    norm, other = K.Normalize(MEAN, STD), K.Normalize(torch.tensor(0.5), torch.tensor([0.2, 0.3, 0.4]))
    source = torch.rand(2, 3, 6, 6)
    stages = {
        "kornia": [norm],
        "fused": [gpuaug.fuse([K.RandomInvert(p=0.0), norm]), lambda images: images],
        "within": [torch.nn.Sequential(K.ImageSequential(torch.nn.Identity(), norm), torch.nn.Identity())],
        "twice": [norm, other],
        "undone": [norm, K.Denormalize(MEAN, STD)],
    }[normalize]
    figure = gpuaug.show(of(source, *stages))
    got = torch.stack([channels_first(each) for each in pixels(figure)[2:]])
    assert torch.allclose(got, source, atol=1e-6)
    assert all("stretched" not in note for note in notes(figure))


def test_normalising_in_a_container_that_picks_is_not_undone():
    for container in (K.ImageSequential, K.AugmentationSequential):
        figure = gpuaug.show(of(torch.rand(2, 3, 6, 6), container(K.Normalize(MEAN, STD), random_apply=1)))
        assert "6x6, stretched" in notes(figure)


def test_normalising_by_chance_is_not_undone():
    figure = gpuaug.show(of(torch.rand(2, 3, 6, 6), gpuaug.fuse(K.Normalize(MEAN, STD, p=0.5), dtype=torch.float16)))
    assert "6x6, stretched" in notes(figure)


def test_other_values_are_stretched_and_said_to_be():
    source = torch.linspace(-2, 5, 3 * 100).reshape(1, 3, 10, 10)
    figure = gpuaug.show(of(source))
    (got,) = pixels(figure)
    low, high = np.quantile(source.numpy(), [0.005, 0.995])
    assert torch.allclose(channels_first(got), ((source[0] - low) / (high - low)).clamp(0, 1), atol=1e-5)
    assert notes(figure) == ["10x10, stretched"]
    # A little beyond the range is rounding, and no number is no pixel.
    kept = torch.full((1, 3, 4, 4), 1.002)
    kept[0, 0, 0, 0] = torch.nan
    figure = gpuaug.show(of(kept))
    assert notes(figure) == ["4x4"]
    assert pixels(figure)[0].flatten().tolist() == [0.0] + [1.0] * 47
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value in (7.0, torch.nan):
            assert pixels(gpuaug.show(of(torch.full((1, 3, 4, 4), value))))[0].unique().tolist() == [0.0]


def test_other_channels_than_three():
    grey, two, six = torch.rand(2, 1, 6, 6), torch.rand(2, 2, 6, 6), torch.randint(0, 256, (2, 6, 6, 6), dtype=torch.uint8)
    figure = gpuaug.show(of(grey))
    assert torch.equal(torch.stack(pixels(figure)), grey[:, 0])
    assert {axes.images[0].get_cmap().name for axes in figure.axes} == {"gray"}
    assert {axes.images[0].get_clim() for axes in figure.axes} == {(0.0, 1.0)}
    figure = gpuaug.show(of(two))
    assert torch.equal(torch.stack(pixels(figure)), two[:, 0])
    assert notes(figure) == ["6x6, channel 1 of 2"]
    figure = gpuaug.show(of(six), n=1)
    assert torch.equal(channels_first(pixels(figure)[0]), six[0, :3] / 255)
    assert notes(figure) == ["6x6, channels 1 to 3 of 6"]


def packed(sizes):
    """Images of sizes of their own, and the same in one buffer."""
    images = [torch.randint(0, 256, (3, height, width), dtype=torch.uint8) for height, width in sizes]
    data = torch.cat([image.permute(1, 2, 0).flatten() for image in images])
    starts = np.cumsum([0, *(3 * height * width for height, width in sizes)])[:-1]
    places = torch.tensor([[start, *size] for start, size in zip(starts, sizes, strict=True)])
    return images, Ragged(data, places, Shapes(np.array(sizes), 3, "hwc"))


@pytest.mark.parametrize("kind", ["ragged", "list"])
def test_images_of_different_sizes_keep_theirs(kind):
    sizes = [(10, 20), (30, 10), (16, 16)]
    images, ragged = packed(sizes)

    def same(batch):
        return torch.stack([image[:, :8, :8] for image in batch])

    figure = gpuaug.show(of((ragged if kind == "ragged" else images, torch.arange(3)), same))
    check(figure, [image / 255 for image in images], [image[:, :8, :8] / 255 for image in images])
    assert notes(figure) == ["20x10", "10x30", "16x16", "8x8"]
    figure.draw_without_rendering()
    for axes, (height, width) in zip(figure.axes, sizes, strict=False):
        across, down = axes.get_window_extent().size
        assert down / across == pytest.approx(height / width)


def test_views_lie_behind_one_another():
    crop = gpuaug.fuse([K.RandomCrop((4, 4)), K.Normalize(MEAN, STD)])
    streamed = loader([TransformStage(lambda images: torch.cat((images, 255 - images, images // 2))), crop])
    figure = gpuaug.show(streamed, n=2)
    images, _ = next(iter(streamed))
    views = shown(images, MEAN, STD).view(3, 4, 3, 4, 4)
    check(figure, streamed.dataset.images[:2] / 255, *views[:, :2])
    assert beside(figure) == ["before", "view 1", "view 2", "view 3"]
    draws = crop.draw((12, 3, 12, 12), gpuaug.core.rng.Position(3, 0, 0, 0).key("transform_2/1"))
    expected = [draws.of(index)["RandomCrop_0"] for index in (0, 1, 4, 5, 8, 9)]
    assert beneath(figure) == [f"Crop at {each['x']:.0f}, {each['y']:.0f}" for each in expected]


def test_draws_of_a_stage_before_the_views_are_those_of_the_sample():
    crop = gpuaug.fuse(K.RandomCrop((4, 4)))
    figure = gpuaug.show(loader([crop, lambda images: torch.cat((images, images))]), n=3)
    said = beneath(figure)
    assert len(said) == 6
    assert said[:3] == said[3:]
    assert len(set(said)) > 1


def test_a_list_of_views_has_a_line_for_each():
    streamed = loader([lambda images: [images, images[..., :6, :6]]])
    figure = gpuaug.show(streamed, n=2)
    sources = streamed.dataset.images[:2] / 255
    check(figure, sources, sources, sources[..., :6, :6])
    assert beside(figure) == ["before", "view 1", "view 2"]
    two = [torch.rand(2, 3, 6, 6), torch.rand(2, 3, 4, 4)]
    figure = gpuaug.show(of({"views": two}))
    check(figure, *two)
    assert beside(figure) == ["as loaded 1", "as loaded 2"]


def test_each_member_that_stages_write_has_a_line():
    def dark(images):
        return images // 2

    def light(images):
        return 255 - images // 2

    stages = [
        TransformStage(dark, into=2, name="night"),
        TransformStage(light, into=3, name="day"),
        TransformStage(light, on=2),
    ]
    streamed = loader(stages)
    figure = gpuaug.show(streamed, n=2)
    images, _, night, day = next(iter(streamed))
    check(figure, images[:2] / 255, night[:2] / 255, day[:2] / 255)
    assert beside(figure) == ["before", "after transform", "after day"]
    batch = {"name": ["a", "b"], "image": torch.rand(2, 3, 4, 4)}
    stages = [TransformStage(lambda x: 1 - x, on="image", into="negative"), TransformStage(lambda x: x / 2, on="image")]
    figure = gpuaug.show(of(batch, *stages))
    check(figure, batch["image"], 1 - batch["image"], batch["image"] / 2)
    assert beside(figure) == ["before", "negative", "image"]


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict", "named", "whole"])
def test_images_are_found_in_batches_of_every_form(form):
    source = torch.rand(2, 3, 4, 4)
    mask = torch.rand(2, 1, 4, 4)
    batch, stage = {
        "tensor": (source, TransformStage(lambda x: 1 - x)),
        "tuple": ((mask, source), TransformStage(lambda x: 1 - x, on=-1)),
        "dict": ({"mask": mask, "image": source}, TransformStage(lambda x: 1 - x, on="image")),
        "named": (
            Sample(mask, source),
            TransformStage(lambda m, x, data_keys: (m, 1 - x), on={"mask": "mask", "image": "image"}),
        ),
        "whole": (
            {"mask": mask, "image": source},
            TransformStage(lambda batch: {**batch, "image": 1 - batch["image"]}, on=None),
        ),
    }[form]
    check(gpuaug.show(of(batch, stage)), source, 1 - source)
    if form != "named":
        check(gpuaug.show(of(batch)) if form != "tuple" else gpuaug.show(of(batch[::-1])), source)


def test_what_is_no_picture_by_its_type_is_not_taken_for_one():
    source = torch.rand(2, 3, 4, 4)
    for other in (torch.ones(2, 1, 4, 4, dtype=torch.int64), torch.ones(2, 1, 4, 4, dtype=torch.bool), source[:, :, :0]):
        check(gpuaug.show(of({"one": other, "another": source})), source)
        with pytest.raises(ArgumentError, match=r"^loader must yield images to be shown"):
            gpuaug.show(of({"one": other}))


def test_a_place_that_is_counted_from_the_end_is_the_same_place():
    source = torch.rand(2, 3, 4, 4)
    stages = [TransformStage(lambda x: 1 - x, on=-1), TransformStage(lambda x: x / 2, on=1)]
    check(gpuaug.show(of((torch.tensor([0, 1]), source), *stages)), source, (1 - source) / 2)


def test_feature_stages_and_what_follows_them_are_left_out():
    encoder = FeatureStage(torch.nn.Flatten(), name="encode")
    calls = []
    streamed = loader([lambda images: images / 255, encoder, TransformStage(calls.append, name="later")])
    figure = gpuaug.show(streamed, n=2)
    check(figure, *[streamed.dataset.images[:2] / 255] * 2)
    assert texts(figure)[0] == "2 of 4 samples in batch 0 of epoch 0, through transform; left out: encode, later"
    assert not calls


def test_a_stage_that_gives_no_images_is_left_out():
    stages = [lambda images: 255 - images, TransformStage(lambda images: images.flatten(1), name="flat"), lambda flat: flat * 2]
    streamed = loader(stages)
    figure = gpuaug.show(streamed, n=2)
    sources = streamed.dataset.images[:2]
    check(figure, sources / 255, (255 - sources) / 255)
    assert texts(figure)[0].endswith("through transform, transform_2; left out: flat")


def test_images_may_come_from_a_stage():
    figure = gpuaug.show(of((torch.full((2, 12), 255, dtype=torch.uint8), torch.tensor([0, 1])), lambda x: x.view(2, 3, 2, 2),
                            lambda x: x // 2))  # fmt: skip
    check(figure, torch.ones(2, 3, 2, 2), torch.full((2, 3, 2, 2), 127 / 255))


CLASSES = ["cat", "dog", "a class with a name that has no end and then some", "bird"]


def test_classes_are_called_by_their_names():
    streamed = loader(count=4, classes=CLASSES)
    assert above(gpuaug.show(streamed))[:2] == ["0: cat", "1: dog"]
    assert above(gpuaug.show(streamed))[3] == "3: bird"
    assert above(gpuaug.show(loader(count=2)))[1] == "1: class 1"
    within = StreamedLoader(DataLoader(Subset(Subset(streamed.dataset, [2, 3]), [1, 0]), 2), device="cpu")
    assert above(gpuaug.show(within))[0] == "0: bird"
    shortened = above(gpuaug.show(within))[1]
    assert shortened.startswith("1: a class")
    assert "…" in shortened
    assert above(gpuaug.show(of(torch.rand(2, 3, 4, 4)))) == ["0", "1"]


def test_a_label_is_written_again_only_where_it_has_changed():
    streamed = loader([TransformStage(lambda labels: labels.flip(0), on=1), lambda images: images], count=3, batch=3)
    assert above(gpuaug.show(streamed)) == ["0: class 0", "1: class 1", "2: class 2", "class 2", "class 0"]


def test_shares_of_classes_are_told():
    shares = torch.tensor([[0.6, 0.0, 0.1, 0.3], [0.0, 1.0, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4], [0.004, 0.0, 0.0, 0.996]])
    streamed = of({"image": torch.rand(4, 3, 4, 4), "label": shares})
    streamed.loader = type("Listed", (list,), {"dataset": type("Data", (), {"classes": CLASSES})})(streamed.loader)
    first, second, long, last = above(gpuaug.show(streamed))
    assert (first, second, last) == ("0: cat 60%, bird 30%", "1: dog", "3: bird")
    assert long.startswith("2: bird 40%, a class")
    assert long.endswith(" 30%")


@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize("kind", ["mixup", "cutmix", "kornia"])
def test_mixed_labels_are_those_of_the_batch(kind, rest):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cut = K.RandomCutMixV2(p=1.0, use_correct_lambda=rest)
    module = {"mixup": gpuaug.fuse(K.RandomMixUpV2(p=1.0)), "cutmix": gpuaug.fuse(cut), "kornia": cut}[kind]
    scale = TransformStage(lambda images: images / 255, name="scale")
    streamed = loader([scale, TransformStage(module, on={0: "input", 1: "class"}, name="mix")], batch=12)
    figure = gpuaug.show(streamed)
    images, labels = next(iter(streamed))
    check(figure, streamed.dataset.images[:8] / 255, shown(images)[:8])
    labels = labels.reshape(-1, 3)[:8]
    expected = []
    for own, partner, share in labels.tolist():
        of_partner = 1 - share if rest and kind != "mixup" else share
        parts = sorted(((of_partner, int(partner)), (1 - of_partner, int(own))), reverse=True)
        told = ", ".join(f"class {label} {part:.0%}" for part, label in parts if part >= 0.005)
        whole = own == partner or max(of_partner, 1 - of_partner) > 0.995
        label = f"class {int(own) if own == partner else parts[0][1]}" if whole else told
        expected += [label] if label != f"class {int(own)}" else []
    assert above(figure)[8:] == expected
    assert len(expected) > 5
    if kind == "mixup":
        assert beneath(figure)[0] == f"MixUp {labels[0, 2]:.2f} of sample {labels[0, 1]:.0f}"


def test_wrong_arguments_are_refused():
    for value, got in (
        ([1], "list. Wrap it: gpuaug.StreamedLoader(loader)."),
        (3, "int. Pass what the training loop iterates over."),
    ):
        with pytest.raises(ArgumentTypeError) as caught:
            gpuaug.show(value)
        assert str(caught.value) == f"loader must be a StreamedLoader, got {got}"
    with pytest.raises(ArgumentTypeError) as caught:
        gpuaug.show(loader(), n=2.5)
    assert str(caught.value) == "n must be a whole number, got 2.5. Leave it out for eight samples."
    with pytest.raises(ArgumentError) as caught:
        gpuaug.show(loader(), n=0)
    assert str(caught.value) == "n must be 1 or more, got 0. Leave it out for eight samples."


@pytest.mark.parametrize(
    ("batches", "stages", "said"),
    [
        ([], (), "loader must have a batch to be shown, got one without any. See whether its dataset is empty."),
        ([torch.rand(0, 3, 4, 4)], (), "The batch must hold samples to be shown, got none. See what the loader yields first."),
        (
            [{"x": torch.rand(2, 5), "label": torch.tensor([0, 1])}],
            (TransformStage(lambda x: x, on="x"),),
            "loader must yield images to be shown, (B, C, H, W) of uint8 or floating, got none in a dict. "
            "Name them with on= of the first stage, or see what the loader yields.",
        ),
        (
            [torch.rand(4, 3, 4, 4)],
            (lambda images: images[:3],),
            "Stages must give as many images for each of the 4 samples, got 3. "
            "Views of a batch have to lie behind one another: (views · B, C, H, W).",
        ),
        (
            iter([torch.rand(4, 3, 4, 4)]),
            (),
            "loader must wrap what can be iterated again and again, got list_iterator, which can be read once. "
            "Wrap a list, a DataLoader, or an object whose __iter__ begins anew.",
        ),
    ],
)
def test_batches_that_cannot_be_shown_are_refused(batches, stages, said):
    with pytest.raises(ArgumentError) as caught:
        gpuaug.show(StreamedLoader(batches, stages, device="cpu"))
    assert str(caught.value) == said


def test_errors_of_stages_and_loaders_keep_their_type_and_say_where():
    def fail(images):
        raise KeyError("mine")

    streamed = loader([TransformStage(fail, name="mine")])
    with pytest.raises(KeyError) as caught:
        gpuaug.show(streamed)
    assert caught.value.__notes__[-1] == "gpuaug: raised in stage 'mine', at batch 0 of epoch 0."
    streamed.stages = []
    assert len(gpuaug.show(streamed).axes) == 4


def test_without_matplotlib_nothing_is_taken(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    streamed = loader([lambda images: pytest.fail("it ran")])
    with pytest.raises(ArgumentError) as caught:
        gpuaug.show(streamed)
    what, way_out = str(caught.value).split(", got ")
    assert what == "matplotlib must be installed to draw samples"
    assert way_out.endswith(". Run pip install matplotlib.")


def test_the_users_style_is_neither_used_nor_changed():
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 20, "image.cmap": "hot"}):
        before = copy.deepcopy(dict(matplotlib.rcParams))
        assert gpuaug.show(loader(), n=1).get_facecolor() == (1.0, 1.0, 1.0, 1.0)
        assert dict(matplotlib.rcParams) == before


@pytest.mark.timeout(120)
def test_drawing_touches_no_global_state():
    script = """
import sys, torch, gpuaug
assert "matplotlib" not in sys.modules
gpuaug.show(gpuaug.StreamedLoader([torch.rand(2, 3, 4, 4)], device="cpu"))
assert "matplotlib.pyplot" not in sys.modules
"""
    done = processes.run_script(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
