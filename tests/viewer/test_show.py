"""``show`` draws the samples that the training loop will get next, with their draws and labels."""

import copy
import io
import pickle
import sys
import warnings

import kornia.augmentation as K
import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.files.encoded import encoded
from support.profiler.viewer import (
    MEAN,
    STD,
    above,
    beneath,
    beside,
    channels_first,
    check,
    loader,
    notes,
    of,
    pixels,
    shown,
    texts,
)
from torch.utils.data import DataLoader, Subset

import gpuaug
from gpuaug import ArgumentError, StreamedLoader, TransformStage

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_encoded_images_are_shown_from_when_they_are_decoded():
    batch = gpuaug.collate_encoded([(encoded(40, 24), 1), (encoded(20, 30, orientation=6), 0)])
    crop = gpuaug.fuse([K.CenterCrop((8, 8))], ragged=True)
    figure = gpuaug.show(StreamedLoader([batch], [gpuaug.DecodeStage(), crop], device="cpu"))
    assert (beside(figure), notes(figure)) == (["before", "after"], ["40x24", "30x20", "8x8"])


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
@settings(max_examples=2)
def test_captions_are_the_draws_of_the_pictures(seed, epoch):
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


def test_captions_of_two_fused_stages_are_in_order():
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


def test_caption_without_draws():
    assert beneath(gpuaug.show(loader([gpuaug.fuse(K.RandomInvert(p=0.0))]), n=1)) == ["unchanged"]
    assert beneath(gpuaug.show(loader([lambda images: images]), n=1)) == []


def test_n_is_the_number_of_samples():
    streamed = loader()
    for n, count in ((1, 1), (9, 4), (np.int64(2), 2)):
        figure = gpuaug.show(streamed, n=n)
        assert len(figure.axes) == count
        assert texts(figure)[0] == f"{count} of 4 samples in batch 0 of epoch 0"
    assert beside(figure) == ["as loaded"]
    assert len(gpuaug.show(loader(count=9, batch=9)).axes) == 8


CLASSES = ["cat", "dog", "a class with a name that has no end and then some", "bird"]


def test_class_names_of_the_dataset():
    streamed = loader(count=4, classes=CLASSES)
    cat, dog, _, bird = above(gpuaug.show(streamed))
    assert (cat, dog, bird) == ("0: cat", "1: dog", "3: bird")
    assert above(gpuaug.show(loader(count=2)))[1] == "1: class 1"
    within = StreamedLoader(DataLoader(Subset(Subset(streamed.dataset, [2, 3]), [1, 0]), 2), device="cpu")
    bird, shortened = above(gpuaug.show(within))
    assert bird == "0: bird"
    assert shortened.startswith("1: a class")
    assert "…" in shortened
    assert above(gpuaug.show(of(torch.rand(2, 3, 4, 4)))) == ["0", "1"]


def test_label_is_repeated_where_it_changed():
    streamed = loader([TransformStage(lambda labels: labels.flip(0), on=1), lambda images: images], count=3, batch=3)
    assert above(gpuaug.show(streamed)) == ["0: class 0", "1: class 1", "2: class 2", "class 2", "class 0"]


def test_soft_labels():
    shares = torch.tensor([[0.6, 0.0, 0.1, 0.3], [0.0, 1.0, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4], [0.004, 0.0, 0.0, 0.996]])
    listed = type("Listed", (list,), {"dataset": type("Data", (), {"classes": CLASSES})})
    streamed = StreamedLoader(listed([{"image": torch.rand(4, 3, 4, 4), "label": shares}]), device="cpu")
    first, second, long, last = above(gpuaug.show(streamed))
    assert (first, second, last) == ("0: cat 60%, bird 30%", "1: dog", "3: bird")
    assert long.startswith("2: bird 40%, a class")
    assert long.endswith(" 30%")


@pytest.mark.parametrize(
    ("kind", "rest"), [("mixup", False), ("cutmix", False), ("cutmix", True), ("kornia", False), ("kornia", True)]
)
def test_mixed_labels(kind, rest):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cut = K.RandomCutMixV2(p=1.0, use_correct_lambda=rest)
    module = {"mixup": gpuaug.fuse(K.RandomMixUpV2(p=1.0)), "cutmix": gpuaug.fuse(cut), "kornia": cut}[kind]
    scale = TransformStage(lambda images: images / 255, name="scale")
    streamed = loader([scale, TransformStage(module, on={0: "input", 1: "class"}, name="mix")], batch=12)
    figure = gpuaug.show(streamed, n=5)
    images, labels = next(iter(streamed))
    check(figure, streamed.dataset.images[:5] / 255, shown(images)[:5])
    labels = labels.reshape(-1, 3)[:5]
    expected = []
    for own, partner, share in labels.tolist():
        of_partner = 1 - share if rest else share
        parts = sorted(((of_partner, int(partner)), (1 - of_partner, int(own))), reverse=True)
        told = ", ".join(f"class {label} {part:.0%}" for part, label in parts if part >= 0.005)
        whole = own == partner or max(of_partner, 1 - of_partner) > 0.995
        label = f"class {int(own) if own == partner else parts[0][1]}" if whole else told
        expected += [label] if label != f"class {int(own)}" else []
    assert above(figure)[5:] == expected
    assert len(expected) > 2
    if kind == "mixup":
        assert beneath(figure)[0] == f"MixUp {labels[0, 2]:.2f} of sample {labels[0, 1]:.0f}"


@pytest.mark.parametrize(
    ("batches", "stages", "said"),
    [
        ([], (), "loader must have a batch to be shown, got no batch. Check whether its dataset is empty."),
        (
            [torch.rand(0, 3, 4, 4)],
            (),
            "The batch must have samples to be shown, got none. Check the first batch of the loader.",
        ),
        (
            [{"x": torch.rand(2, 5), "label": torch.tensor([0, 1])}],
            (TransformStage(lambda x: x, on="x"),),
            "loader must yield images to be shown, (B, C, H, W) of uint8 or floating, got none in a dict. "
            "Pass on= with the member of the images to the first stage.",
        ),
        (
            [torch.rand(4, 3, 4, 4)],
            (lambda images: images[:3],),
            "Stages must return equally many images for each of the 4 samples, got 3 images. "
            "Concatenate views along the batch axis: (views · B, C, H, W).",
        ),
        (
            iter([torch.rand(4, 3, 4, 4)]),
            (),
            "loader must wrap an iterable that can be iterated repeatedly, got list_iterator, which can be read once. "
            "Wrap a list, a DataLoader, or an object whose __iter__ returns a new iterator.",
        ),
    ],
)
def test_batches_that_cannot_be_shown_are_refused(batches, stages, said):
    with pytest.raises(ArgumentError) as caught:
        gpuaug.show(StreamedLoader(batches, stages, device="cpu"))
    assert str(caught.value) == said


def test_show_without_matplotlib_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    streamed = loader([lambda images: pytest.fail("it ran")])
    with pytest.raises(ArgumentError) as caught:
        gpuaug.show(streamed)
    what, way_out = str(caught.value).split(", because matplotlib cannot be imported: ")
    assert what == "Drawing samples failed"
    assert way_out.endswith(". Run pip install matplotlib.")


def test_matplotlib_style_is_neither_used_nor_changed():
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 20, "image.cmap": "hot"}):
        before = copy.deepcopy(dict(matplotlib.rcParams))
        assert gpuaug.show(loader(), n=1).get_facecolor() == (1.0, 1.0, 1.0, 1.0)
        assert dict(matplotlib.rcParams) == before


def test_notebook_shows_the_picture():
    figure = gpuaug.show(loader(), n=1)
    picture = Image.open(io.BytesIO(figure._repr_png_()))
    assert picture.size == pytest.approx(figure.get_size_inches() * 100, abs=1)
    assert isinstance(pickle.loads(pickle.dumps(figure)), type(figure))
