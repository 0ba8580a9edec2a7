"""Members of a batch: what is stored, what is read again, and what is refused."""

import os
from collections import OrderedDict, UserDict

import kornia.augmentation as K
import pytest
import torch
from support.cache.cached_loaders import (
    COUNT,
    DEVICES,
    FORMS,
    Files,
    as_dict,
    assert_equal,
    encoder,
    epochs_of,
    loader,
    rows_of,
    stages,
    whole_epochs,
)
from support.comparison.values import assert_values
from torch import nn
from torchvision.transforms import v2

import gpuaug
from gpuaug import ArgumentError, FeatureCache
from gpuaug.core.packed_targets import pack_targets
from gpuaug.stages.copy import Copier


def boxes_and_index(path, index):
    boxes = torch.tensor([[1.0, 2, 9, 12], [3, 4, 20, 18]][: index % 3])
    return {"image": gpuaug.read_encoded(path), "label": index, "target": {"boxes": boxes.reshape(-1, 4), "id": index}}


def test_targets_that_moved_with_the_image_are_stored(paths, tmp_path):
    pipeline = K.AugmentationSequential(
        K.RandomHorizontalFlip(), K.RandomCrop((16, 16), pad_if_needed=True), data_keys=["input", "bbox_xyxy"]
    )
    flip = gpuaug.fuse(pipeline, ragged=True)
    dataset = Files(paths, boxes_and_index)

    def targets(cache, wrapped, epochs):
        made = [
            gpuaug.DecodeStage(),
            gpuaug.TransformStage(flip, on={"image": "input", "target": "targets"}),
            gpuaug.TransformStage(gpuaug.sanitize, on="target"),
            gpuaug.TransformStage(lambda images: images.float(), on="image"),
            gpuaug.FeatureStage(encoder(), on="image", into="latents", cache=cache),
        ]
        streamed = loader(wrapped, made)
        return [
            {int(label): target for batch in streamed for label, target in zip(batch["label"], batch["target"], strict=True)}
            for _ in range(epochs)
        ]

    cache = FeatureCache(tmp_path / "cache", views=2)
    expected = targets(None, dataset, 2)
    got = targets(cache, cache.wrap(dataset), 3)
    os.utime(paths[5], ns=(1, 1))
    got += targets(cache, cache.wrap(dataset), 1)  # epoch 0, with one missing row
    for epoch, samples in enumerate(got):
        for label, target in samples.items():
            view = epoch % 2 if epoch < 3 else 0
            assert target["id"] == label
            torch.testing.assert_close(target["boxes"], expected[view][label]["boxes"], rtol=0, atol=0)


def test_a_sample_without_a_row_has_all_values_of_the_stages(paths, tmp_path):
    def sample(path, index):
        target = {"boxes": torch.ones(2, 4), "names": ["cat", "dog"], "crowd": False}
        return {**as_dict(path, index), "target": target}

    def keep_first(targets):
        return [{"boxes": target["boxes"][:1], "names": target["names"][:1]} for target in targets]

    cache = FeatureCache(tmp_path / "cache")
    made = stages(cache)
    made.insert(2, gpuaug.TransformStage(keep_first, on="target"))
    streamed = loader(cache.wrap(Files(paths, sample)), made, shuffle=None, generator=None)
    list(streamed)
    os.utime(paths[1], ns=(1, 1))
    [batch, *_] = streamed
    assert streamed.stats().rows_read == COUNT - 1
    assert batch["target"][1].keys() == {"boxes", "names"}
    assert batch["target"][1]["names"] == ["cat"]
    assert [len(target["boxes"]) for target in batch["target"]] == [1] * 4


@pytest.mark.parametrize("member", ["label", "target"])
def test_a_member_that_a_stage_writes_only_in_some_batches(member, paths, tmp_path):
    def sample(path, index):
        return {**as_dict(path, index), "target": {"scores": torch.ones(2)}}

    def moved_by_9(values):
        if len(values) == 2:
            return values
        return values + 9 if member == "label" else [{"scores": target["scores"] + 9} for target in values]

    cache = FeatureCache(tmp_path / "cache")
    made = stages(cache)
    made.insert(2, gpuaug.TransformStage(moved_by_9, on=member))
    wrapped = cache.wrap(Files(paths, sample), key="label")
    list(loader(wrapped, made, batch=4, shuffle=None, generator=None))
    os.utime(paths[1], ns=(1, 1))
    batch = next(iter(loader(wrapped, made, batch=2, shuffle=None, generator=None)))
    moved_values = batch["label"] if member == "label" else [target["scores"][0] for target in batch["target"]]
    assert [int(value) for value in moved_values] == ([9, 1] if member == "label" else [10, 1])


@pytest.mark.parametrize("device", DEVICES)
def test_members_that_no_stage_writes_are_those_of_the_epoch(device, paths, tmp_path):
    epoch = [0]

    def sample(path, index):
        targets = {"scores": torch.full((index % 3, 2), float(epoch[0]))}
        return {**as_dict(path, index), "target": targets, "epoch": epoch[0], "caption": f"caption {epoch[0]}"}

    cache = FeatureCache(tmp_path / "cache")
    streamed = loader(cache.wrap(Files(paths, sample)), stages(cache), device=device)
    for epoch[0] in range(3):
        if epoch[0] == 2:
            os.utime(paths[4], ns=(1, 1))  # one batch has a missing row
        for batch in streamed:
            assert batch["epoch"].unique().tolist() == [epoch[0]]
            assert set(batch["caption"]) == {f"caption {epoch[0]}"}
            for label, target in zip(batch["label"].tolist(), batch["target"], strict=True):
                assert target["scores"].tolist() == [[epoch[0]] * 2] * (label % 3)


def test_features_of_several_dtypes_and_parts(paths, tmp_path):
    class Several(nn.Module):
        def forward(self, images):
            mean = images.mean((2, 3))
            return {"half": mean.bfloat16(), "byte": (mean * 255).byte(), "scalar": mean[:, 0], "flag": mean > 0.5}

    cache = FeatureCache(tmp_path / "cache")

    def values(batch):
        parts = batch["latents"].values()
        return [torch.cat([part[index].double().reshape(-1) for part in parts]) for index in range(len(batch["label"]))]

    streamed = loader(cache.wrap(Files(paths, as_dict)), stages(cache, module=Several()))
    first, second = epochs_of(streamed, 2, value=values)
    assert_equal(second, first)
    assert [part.dtype for part in next(iter(streamed))["latents"].values()] == [
        torch.bfloat16,
        torch.uint8,
        torch.float32,
        torch.bool,
    ]


class Named(dict):
    """Mapping whose keys are attributes."""

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]


@pytest.mark.parametrize("cls", [Named, OrderedDict, UserDict])
def test_the_class_of_a_mapping_is_kept(cls, paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    dataset = cache.wrap(Files(paths, lambda path, index: cls(as_dict(path, index))))
    recorded, read = whole_epochs(loader(dataset, stages(cache)), 2)
    assert {type(batch) for batch in [*recorded, *read]} == {cls}
    assert [("image" in batch) for batch in (recorded[0], read[0])] == [True, False]


def test_members_that_cannot_be_stored(paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    made = stages(cache)
    made.insert(2, gpuaug.TransformStage(lambda images: images.sum(), on="image", into="sum"))
    with pytest.raises(gpuaug.ArgumentTypeError, match="Put the stage that writes it after the encoder"):
        rows_of(loader(cache.wrap(Files(paths, as_dict)), made))


def numbered(value, other):
    """Return a stage's function that writes ``value`` into the target dict of sample 0, and ``other`` into the others."""
    return lambda targets: [{**target, **(other if target["id"] else value)} for target in targets]


BOXES = torch.ones(2, 4)
TARGETS = {
    "other shapes": (True, {"boxes": BOXES[:0]}, {"boxes": BOXES}),
    "numbers": (True, {"boxes": torch.tensor(1)}, {"boxes": torch.tensor(2)}),
    "other number of axes": (False, {"boxes": torch.tensor([])}, {"boxes": BOXES}),
    "other dtype": (False, {"boxes": BOXES[:0]}, {"boxes": BOXES.long()}),
    "key of the first only": (False, {"boxes": BOXES}, {}),
    "key of the others only": (False, {}, {"boxes": BOXES}),
    "text": (False, {"boxes": BOXES, "flipped": "yes"}, {"boxes": BOXES, "flipped": "no"}),
}


@pytest.mark.parametrize("name", TARGETS)
def test_target_dicts_that_differ_between_samples(name, paths, tmp_path):
    """They are read as they were recorded, or refused."""
    is_stored, *entries = TARGETS[name]
    cache = FeatureCache(tmp_path / "cache")
    made = stages(cache)
    made.insert(2, gpuaug.TransformStage(numbered(*entries), on="target"))
    dataset = Files(paths, lambda path, index: {**as_dict(path, index), "target": {"id": index}})
    streamed = loader(cache.wrap(dataset, key="label"), made, shuffle=None, generator=None)
    if not is_stored:
        with pytest.raises(gpuaug.ArgumentTypeError, match="Put the stage that writes it after the encoder"):
            list(streamed)
        return
    first, second = whole_epochs(streamed, 2)
    assert streamed.stats().rows_read == COUNT
    for recorded, read in zip(first, second, strict=True):
        for target, expected in zip(read["target"], recorded["target"], strict=True):
            assert target["id"] == expected["id"]
            assert_values(target["boxes"], expected["boxes"])


@pytest.mark.parametrize("name", [name for name, (is_stored, *_) in TARGETS.items() if not is_stored and name != "text"])
def test_rows_that_differ_between_batches(name, paths, tmp_path):
    """Each batch is stored, but a batch of rows of both is refused."""
    _, *entries = TARGETS[name]
    cache = FeatureCache(tmp_path / "cache")
    made = stages(cache)
    made.insert(2, gpuaug.TransformStage(numbered(*entries), on="target"))
    wrapped = cache.wrap(Files(paths, lambda path, index: {**as_dict(path, index), "target": {"id": index}}), key="label")
    options = {"shuffle": None, "generator": None}
    list(loader(wrapped, made, batch=1, **options))
    with pytest.raises(ArgumentError, match="must have the same columns, dtypes and shapes"):
        list(loader(wrapped, made, batch=2, **options))


class Output(OrderedDict):
    """Result of an encoder, as ``ModelOutput`` of Transformers."""


class Result(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, images):
        return self.function(images.mean((2, 3)))


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize(
    "result",
    [
        lambda mean: Output(pooled=mean),
        lambda mean: (mean, mean),
        lambda mean: {1: mean},
        lambda mean: {"a": mean[0]},
        lambda mean: torch.complex(mean, mean).to(torch.complex128),
    ],
    ids=["class of mappings", "tuple", "keys", "shape", "complex128"],
)
def test_results_that_cannot_be_stored(result, bare, paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    sample = (lambda path, index: gpuaug.read_encoded(path)) if bare else as_dict
    made = stages(cache, module=Result(result), capture="never", **({"on": ..., "into": ...} if bare else {}))
    with pytest.raises((ArgumentError, gpuaug.ArgumentTypeError), match=r"Members|Names of members"):
        list(loader(cache.wrap(Files(paths, sample)), made))


def several(mean):
    return {"a": mean, "b.c": 2 * mean, "d[]": 3 * mean, "e::f": 4 * mean}


NAMES = ["observation.latents", "x[", "shapes", "features.shapes", " "]
"""Names of members of any type."""


@pytest.mark.parametrize("name", [*NAMES, "x[]", "x:", "[]"])
@pytest.mark.parametrize("function", [lambda mean: mean, several], ids=["tensor", "mapping"])
def test_names_of_members(name, function, paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    made = stages(cache, into=name, module=Result(function))
    streamed = loader(cache.wrap(Files(paths, as_dict)), made, shuffle=None, generator=None)
    if function is several and name not in NAMES:
        with pytest.raises(ArgumentError, match="must be text without '::'"):
            list(streamed)
        return
    first, second = whole_epochs(streamed, 2)
    os.utime(paths[1], ns=(1, 1))
    streamed.set_epoch(0)
    for recorded, *others in zip(first, second, list(streamed), strict=True):
        for batch in others:
            torch.testing.assert_close(batch[name], recorded[name], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["row.id", "row.latents", "a::b", "::"])
def test_names_that_are_refused(name, paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    with pytest.raises(ArgumentError, match="must be text without '::'"):
        list(loader(cache.wrap(Files(paths, as_dict)), stages(cache, into=name)))


def test_images_as_batches_with_a_mapping_as_result(paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    dataset = cache.wrap(Files(paths, lambda path, index: gpuaug.read_encoded(path)))
    made = stages(cache, on=..., into=..., module=Result(lambda mean: {"a": mean, "b": 2 * mean}))
    streamed = loader(dataset, made, shuffle=None, generator=None)
    first, second = whole_epochs(streamed, 2)
    os.utime(paths[1], ns=(1, 1))
    streamed.set_epoch(0)
    for recorded, *others in zip(first, second, list(streamed), strict=True):
        for batch in others:
            assert_equal(batch, recorded)


class Question(nn.Module):
    def forward(self, questions):
        return questions * 10


def test_members_on_which_rows_depend(paths, tmp_path):
    """Each image occurs twice, with two questions."""

    def sample(path, index):
        return {**as_dict(paths[index // 2], index), "question": torch.full((3,), float(index)), "id": index}

    def made(cache, on):
        asked = gpuaug.TransformStage(lambda batch: {**batch, "latents": batch["question"] * 10}, on=None)
        text = gpuaug.FeatureStage(Question(), on="question", into="states", name="text")
        return [gpuaug.DecodeStage(), text if on else asked, *stages(cache)[1:]]

    dataset = Files(paths, sample)
    for on in (None, "question"):
        cache = FeatureCache(tmp_path / f"cache {on}")
        with pytest.raises(ArgumentError, match=r"got \[.*'question'.*name each sample with cache\.wrap\(dataset, key=…\)"):
            list(loader(cache.wrap(dataset), made(cache, on)))
    streamed = loader(cache.wrap(dataset, key="id"), made(cache, on))
    for _ in range(2):
        for batch in streamed:
            assert batch["states"].tolist() == (batch["question"] * 10).tolist()
    assert streamed.stats().rows_read == COUNT


@pytest.mark.parametrize("form", ["dicts", "tuples"])
def test_stages_behind_that_read_images(form, paths, tmp_path):
    sample, options = FORMS[form]
    cache = FeatureCache(tmp_path / "cache")
    made = [*stages(cache, **options), gpuaug.TransformStage(lambda images: images, on=options["on"], name="behind")]
    with pytest.raises(ArgumentError, match=r"in stage 'behind'\. Put the stage before the encoder"):
        list(loader(cache.wrap(Files(paths, sample)), made))


@pytest.mark.parametrize("on", [..., "mask"])
def test_images_that_are_decoded_behind_the_encoder(on, paths, tmp_path):
    """Refused at the first batch, not when rows are read and the images are absent."""
    cache = FeatureCache(tmp_path / "cache")
    _, *others = stages(cache)
    first = [] if on is ... else [gpuaug.DecodeStage(on="image")]
    dataset = Files(paths, lambda path, index: {**as_dict(path, index), "mask": gpuaug.read_encoded(path)})
    with pytest.raises(ArgumentError, match=r"Images must be decoded before the encoder, .* got images in stage 'behind'"):
        list(loader(cache.wrap(dataset), [*first, *others, gpuaug.DecodeStage(on=on, name="behind")]))


def test_a_stage_before_the_encoder_that_returns_no_container(paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    images = gpuaug.TransformStage(lambda batch: batch["image"], on=None)
    made = [gpuaug.DecodeStage(), images, *stages(cache, on=..., into=...)[1:]]
    with pytest.raises(gpuaug.ArgumentTypeError, match="Stages up to the encoder must return a batch with members, got"):
        list(loader(cache.wrap(Files(paths, as_dict)), made))


class Masked(nn.Module):
    def forward(self, images, masks):
        return (images * masks).mean((2, 3))


def resized(images):
    return torch.stack([nn.functional.interpolate(image[None].float(), (16, 16))[0] for image in images])


def half_masks(path, index):
    mask = torch.zeros(1, 16, 16)
    mask[..., :8] = index + 1
    return {**as_dict(path, index), "mask": mask}


def test_members_that_a_later_stage_reads_are_stored(paths, tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    made = [
        gpuaug.DecodeStage(),
        gpuaug.TransformStage(resized, on="image"),
        gpuaug.TransformStage(lambda images, masks: (images.flip(-1), masks.flip(-1)), on=("image", "mask")),
        gpuaug.TransformStage(lambda labels: labels.add_(100), on="label", name="in place"),
        gpuaug.FeatureStage(Masked(), on=("image", "mask"), into="latents", cache=cache),
    ]
    streamed = loader(cache.wrap(Files(paths, half_masks)), made, shuffle=None, generator=None)
    first, second = whole_epochs(streamed, 2)
    os.utime(paths[2], ns=(1, 1))
    streamed.set_epoch(0)
    third = list(streamed)
    assert streamed.stats().rows_encoded == COUNT + 1
    for recorded, *others in zip(first, second, third, strict=True):
        for batch in others:
            assert_equal({name: batch[name] for name in batch}, {name: recorded[name] for name in batch})
            assert {"mask", "label", "latents"} <= batch.keys()
    assert "image" not in second[0]


def copy_packed(copier, batch, copy=Copier.copy):
    """Copy a batch with packed target dicts, as to a GPU: the number of boxes after a removal is then known later."""
    copied = copy(copier, pack_targets(batch, lambda shape, dtype: None))
    copied.packed = True
    return copied


def test_batches_are_not_packed_with_their_columns(paths, tmp_path, monkeypatch):
    monkeypatch.setattr(Copier, "copy", copy_packed)
    more = {f"state {number}": torch.zeros(3) for number in range(8)}
    cache = FeatureCache(tmp_path / "cache")
    made = [gpuaug.DecodeStage(on="image"), *stages(cache)[1:]]
    streamed = loader(cache.wrap(Files(paths, lambda path, index: {**as_dict(path, index), **more})), made)
    first, second = epochs_of(streamed, 2)
    assert_equal(second, first)


def test_boxes_that_a_stage_removed_are_not_recorded(paths, tmp_path, monkeypatch):
    monkeypatch.setattr(Copier, "copy", copy_packed)
    pipeline = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop((8, 8))])

    def sample(path, index):
        boxes = torch.tensor([[0.0, 0, 3, 3], [3, 4, 20, 18], [1, 1, 12, 12]][: index % 4]).reshape(-1, 4)
        return {**as_dict(path, index), "target": {"boxes": boxes, "labels": torch.arange(len(boxes))}}

    def targets(cache, dataset, epochs):
        made = [
            gpuaug.DecodeStage(on="image"),
            gpuaug.TransformStage(gpuaug.fuse(pipeline, ragged=True), on={"image": "input", "target": "targets"}),
            gpuaug.TransformStage(gpuaug.sanitize, on="target"),
            gpuaug.TransformStage(lambda images: images.float(), on="image"),
            gpuaug.FeatureStage(encoder(), on="image", into="latents", cache=cache),
        ]
        streamed = loader(dataset, made)
        return [
            {
                int(label): torch.cat([target["boxes"], target["labels"][:, None]], 1)
                for batch in streamed
                for label, target in zip(batch["label"], batch["target"], strict=True)
            }
            for _ in range(epochs)
        ]

    cache = FeatureCache(tmp_path / "cache")
    dataset = Files(paths, sample)
    [expected] = targets(None, dataset, 1)
    assert 0 < sum(map(len, expected.values())) < sum(index % 4 for index in range(COUNT))
    for rows in targets(cache, cache.wrap(dataset), 2):
        assert_equal(rows, expected)
