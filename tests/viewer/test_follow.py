"""Which tensors of a batch are followed through the stages, and how their views and members are drawn."""

from collections import namedtuple

import kornia.augmentation as K
import pytest
import torch
from support.profiler.viewer import MEAN, STD, above, beneath, beside, check, loader, of, shown, texts

import gpuaug
from gpuaug import ArgumentError, FeatureStage, TransformStage

Sample = namedtuple("Sample", ("mask", "image"))


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


def test_integer_bool_and_empty_tensors_are_no_images():
    source = torch.rand(2, 3, 4, 4)
    for other in (torch.ones(2, 1, 4, 4, dtype=torch.int64), torch.ones(2, 1, 4, 4, dtype=torch.bool), source[:, :, :0]):
        check(gpuaug.show(of({"one": other, "another": source})), source)
        with pytest.raises(ArgumentError, match=r"^loader must yield images to be shown"):
            gpuaug.show(of({"one": other}))


def test_negative_on_is_the_same_member():
    source = torch.rand(2, 3, 4, 4)
    stages = [TransformStage(lambda x: 1 - x, on=-1), TransformStage(lambda x: x / 2, on=1)]
    check(gpuaug.show(of((torch.tensor([0, 1]), source), *stages)), source, (1 - source) / 2)


def test_image_before_a_stage_that_writes_in_place():
    def invert(images):
        return images.mul_(-1).add_(255)

    sources = torch.randint(0, 256, (2, 3, 6, 6), dtype=torch.uint8)
    figure = gpuaug.show(of(sources.clone(), invert))
    check(figure, shown(sources / 255), shown((255 - sources) / 255))


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


def test_views_of_one_tensor():
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


def cameras():
    return {
        "wrist": torch.rand(2, 3, 4, 4),
        "top": torch.rand(2, 3, 4, 4),
        "action": torch.rand(2, 6),
        "index": torch.tensor([7, 8]),
    }


CAMERAS = {
    "data keys": [TransformStage(lambda *x, data_keys: tuple(1 - y for y in x), on={"wrist": "input", "top": "input"})],
    "a tuple": [TransformStage(lambda *x: tuple(1 - y for y in x), on=("wrist", "top"))],
    "a stage per camera": [TransformStage(lambda x: 1 - x, on="wrist"), TransformStage(lambda x: 1 - x, on="top")],
}


@pytest.mark.parametrize("stages", CAMERAS.values(), ids=CAMERAS)
def test_every_camera_is_shown_before_and_after_the_stages(stages):
    batch = cameras()
    figure = gpuaug.show(of(batch, *stages))
    check(figure, batch["wrist"], batch["top"], 1 - batch["wrist"], 1 - batch["top"])
    assert beside(figure) == ["wrist, before", "top, before", "wrist", "top"]
    assert above(figure) == ["0", "1"], "an index is no class"


def test_cameras_in_a_tuple_and_without_stages():
    first, second = torch.rand(2, 3, 4, 4), torch.rand(2, 3, 4, 4)
    figure = gpuaug.show(of((first, second), TransformStage(lambda x, y: (1 - x, 1 - y), on=(0, 1))))
    check(figure, first, second, 1 - first, 1 - second)
    assert len(set(beside(figure))) == 4
    assert beside(gpuaug.show(of(cameras()))) == ["wrist, as loaded", "top, as loaded"]
