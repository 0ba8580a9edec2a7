"""Nothing in the picture lies over anything else, and all of it is within the picture."""

from itertools import combinations

import kornia.augmentation as K
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kornia.augmentation.auto import RandAugment
from support.comparison.replay import left_to_kornia
from support.profiler.viewer import above, beneath, beside, extents, loader, notes, of

import gpuaug
from gpuaug import FeatureStage, TransformStage
from gpuaug.core.plotting import text_width_in
from gpuaug.viewer.figure import wrapped

MANY = [RandAugment(n=4, m=10), K.ColorJitter(0.4, 0.4, 0.4, 0.1), K.RandomAffine(20.0, (0.1, 0.1), (0.8, 1.2), 5.0, p=1.0)]
LONG = "a_stage_with_a_name_that_is_longer_than_any_stage_needs_it_to_be"


def assert_laid_out(figure):
    """No text and no picture overlaps another one by more than a pixel, or leaves the figure."""
    texts, pictures = extents(figure)
    width, height = figure.get_size_inches() * figure.dpi
    for x0, y0, x1, y1 in [*texts, *pictures]:
        assert -1 <= x0 < x1 <= width + 1
        assert -1 <= y0 < y1 <= height + 1
    for (a0, b0, a1, b1), (c0, d0, c1, d1) in combinations([*texts, *pictures], 2):
        assert a1 <= c0 + 1 or c1 <= a0 + 1 or b1 <= d0 + 1 or d1 <= b0 + 1


@pytest.mark.parametrize("count", [9, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 2, 8))])
@left_to_kornia
def test_many_draws_and_long_names_do_not_overlap(count):
    classes = [f"class {'of a long name ' * (index % 4)}{index}" for index in range(count)]
    augment = TransformStage(gpuaug.fuse(MANY, pick="sample"), name=LONG)
    streamed = loader([augment, FeatureStage(torch.nn.Flatten(), name="and_a_feature_stage")], count, count, classes)
    figure = gpuaug.show(streamed, n=count)
    assert len(figure.axes) == 2 * count
    assert max(said.count("\n") for said in beneath(figure)) >= 5
    assert_laid_out(figure)


@given(st.lists(st.tuples(st.integers(4, 40), st.integers(4, 40)), min_size=1, max_size=10), st.integers(1, 3))
@settings(max_examples=3)
def test_pictures_of_every_shape_do_not_overlap(sizes, views):
    images = [torch.rand(3, height, width) for height, width in sizes]

    def twisted(images):
        return torch.stack([image[:, :3, :4] for image in images * views])

    figure = gpuaug.show(of((images, torch.arange(len(images))), twisted), n=10)
    assert len(figure.axes) == len(images) * (1 + views)
    assert_laid_out(figure)


def test_flat_and_high_pictures_do_not_overlap():
    for height, width in ((2, 60), (60, 2)):
        stages = [
            TransformStage(gpuaug.fuse(MANY[2]), into=1, name=LONG),
            TransformStage(gpuaug.fuse(MANY[2]), into=2, name="b"),
        ]
        assert_laid_out(gpuaug.show(of((torch.rand(2, 3, height, width) * 9 - 4,), *stages)))


def test_flat_pictures_leave_room_for_texts():
    figure = gpuaug.show(of(torch.rand(8, 3, 2, 60), lambda images: images * 0.5))
    assert beside(figure) == ["before", "after"]
    assert notes(figure) == ["60x2", "60x2"]
    assert_laid_out(figure)


def test_captions_of_more_than_eight_lines_are_cut_off():
    (said,) = beneath(gpuaug.show(of(torch.rand(1, 3, 8, 8), gpuaug.fuse([K.RandomInvert(p=1.0)] * 8))))
    assert said.split("\n") == ["Invert"] * 8
    (said,) = beneath(gpuaug.show(of(torch.rand(1, 3, 8, 8), gpuaug.fuse([K.RandomInvert(p=1.0)] * 9))))
    assert said.split("\n") == ["Invert"] * 7 + ["…"]


def test_columns_share_the_samples_evenly():
    def rows(count):
        boxes = [axes.get_position() for axes in gpuaug.show(loader(count=count, batch=count), n=count).axes]
        tops = sorted({round(box.y1, 4) for box in boxes}, reverse=True)
        return [sum(round(box.y1, 4) == top for box in boxes) for top in tops]

    assert {count: rows(count) for count in (9, 17)} == {9: [5, 4], 17: [6, 6, 5]}


def test_long_labels_keep_their_shares():
    shares = torch.tensor([[0.7, 0.3]] * 3)

    class Named(list):
        classes = ["a very long name of a class", "another very long name"]  # noqa: RUF012
        dataset = property(lambda self: self)

    streamed = gpuaug.StreamedLoader(Named([(torch.rand(3, 3, 4, 4), shares)]), device="cpu")
    figure = gpuaug.show(streamed)
    for label in above(figure):
        first, second = label.split(", ")
        assert first.endswith(" 70%")
        assert second.endswith(" 30%")
        assert "…" in first
    assert_laid_out(figure)


@given(st.lists(st.text("abcdefgh", min_size=1, max_size=30), min_size=1, max_size=6), st.floats(0.3, 3.0))
@settings(max_examples=10)
def test_wrapped_lines_fit_and_keep_words_that_fit(words, room_in):
    size = 7.0
    lines = wrapped(" ".join(words), size, room_in, indent=3)
    assert all(text_width_in(line.strip(), size) <= room_in for line in lines)
    assert all(line.startswith("   ") for line in lines[1:])
    got = " ".join(line.strip() for line in lines).split(" ")
    assert len(got) == len(words)
    for word, shown in zip(words, got, strict=True):
        assert shown == word or "…" in shown or shown == word[:1]
        assert shown == word or text_width_in(word, size) > room_in - 0.2
