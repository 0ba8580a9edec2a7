"""Targets of clips: of one clip, or of each of its frames, they follow the draw of the clip."""

import kornia.augmentation as K
import pytest
import torch
from support.batches.clips import clips
from support.comparison.replay import as_kornia_takes_them, left_to_kornia, overriding
from support.comparison.values import assert_values
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug

BATCH, FRAMES, BOXES, SIDES = 3, 4, 2, (24, 32)


def videos(**options):
    return clips(BATCH, FRAMES, 3, *SIDES, **options)


def boxes(*shape, seed=0):
    """Boxes of at least five pixels a side, (*shape, 4)."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.rand(*shape, 2, generator=generator) * 12
    return torch.cat((start, start + 5 + torch.rand(*shape, 2, generator=generator) * 6), -1).round()


def painted(given):
    """Masks (B, T, 1, H, W) with ones in the first box of each frame, given boxes (B, T, N, 4)."""
    made = torch.zeros(*given.shape[:2], 1, *SIDES)
    for clip in range(given.shape[0]):
        for frame in range(given.shape[1]):
            left, top, right, bottom = (int(side) for side in given[clip, frame, 0])
            made[clip, frame, 0, top:bottom, left:right] = 1
    return made


KORNIA = {
    "flips": lambda: [K.RandomHorizontalFlip(), K.RandomVerticalFlip()],
    "crop": lambda: [K.RandomResizedCrop((18, 20)), K.RandomHorizontalFlip()],
    "warps": lambda: [K.RandomAffine(20.0, (0.1, 0.1), p=0.7), K.RandomPerspective(p=0.7)],
    "left to Kornia": lambda: [
        K.RandomHorizontalFlip(),
        overriding(K.RandomRotation, "compute_transformation")(30.0),
        K.RandomShear(0.2),
    ],
}


@pytest.mark.parametrize("data_format", ["BTCHW", "BCTHW"])
@pytest.mark.parametrize("name", KORNIA)
@left_to_kornia
def test_targets_of_frames_replay(name, data_format):
    swapped = (lambda x: x.transpose(1, 2)) if data_format == "BCTHW" else (lambda x: x)
    images, masks = swapped(videos()), swapped(painted(boxes(BATCH, FRAMES, BOXES)))
    corners = torch.tensor([[4.0, 5], [20, 5], [20, 18], [4, 18]]) + torch.rand(BATCH, FRAMES, BOXES, 1, 2)
    points = torch.rand(BATCH, FRAMES, 5, 2) * 20
    keys = ["input", "mask", "bbox", "keypoints"]
    pipeline = K.AugmentationSequential(K.VideoSequential(*KORNIA[name](), data_format=data_format), data_keys=keys)
    augment = gpuaug.fuse(pipeline)
    for seed in range(3):
        draws = augment.draw(images.shape, seed=seed)
        expected = pipeline(as_kornia_takes_them(images), masks, corners, points, params=draws.as_kornia())
        got = augment(images, masks, corners, points, draws=draws)
        for key, one, other in zip(keys, got, expected, strict=True):
            assert_values(one, other, atol=2e-4, share=0.01 if key == "mask" else 0, about=key)


@pytest.mark.parametrize("whole", [False, True], ids=["of frames", "of clips"])
def test_valid_follows_padded_boxes(whole):
    given = boxes(BATCH, 5) if whole else boxes(BATCH, FRAMES, 5)
    valid = torch.arange(5).expand(given.shape[:-1]) < 4
    augment = gpuaug.fuse([v2.RandomCrop((9, 12)), v2.RandomHorizontalFlip()])
    images = videos()
    draws = augment.draw(images.shape, seed=2)
    keys = ["input", "bbox_xyxy", "valid"]
    _, landed, kept = augment(images, given, valid, data_keys=keys, draws=draws)
    assert landed.shape == given.shape
    assert kept.shape == valid.shape
    assert 0 < kept.sum() < valid.sum()
    assert not kept[..., 4].any()
    for frame in range(1 if whole else FRAMES):
        one, one_valid = (given, valid) if whole else (given[:, frame], valid[:, frame])
        frame_draws = augment.draw(images[:, 0].shape, seed=2)
        _, expected, expected_kept = augment(images[:, frame], one, one_valid, data_keys=keys, draws=frame_draws)
        assert_values(landed if whole else landed[:, frame], expected)
        assert_values(kept if whole else kept[:, frame], expected_kept)


def dicts(count):
    """One for each clip or frame: the first has nothing, all others have boxes, masks and labels."""
    made = []
    for index in range(count):
        number = index % 3
        made.append(
            {
                "boxes": boxes(number, seed=index),
                "masks": (torch.rand(number, *SIDES, generator=torch.Generator().manual_seed(index)) < 0.5).to(torch.uint8),
                "labels": torch.arange(number) + index,
                "image_id": index,
            }
        )
    return made


def test_crops_by_boxes_look_at_all_frames():
    images, augment = videos(dtype=torch.float32), gpuaug.fuse([v2.RandomIoUCrop(), v2.Resize((16, 16))])
    for records in (dicts(BATCH), [dicts(FRAMES) for _ in range(BATCH)]):
        made, got = augment(images, records, data_keys=["input", "targets"])
        assert made.shape == (BATCH, FRAMES, 3, 16, 16)
        assert len(got) == BATCH
    still = images[:, :1].expand_as(images)
    made, _ = augment(still, dicts(BATCH), data_keys=["input", "targets"])
    assert_values(made, made[:, :1].expand_as(made))


def typed_record(number, clip, frame):
    canvas = {"canvas_size": SIDES}
    return {
        "boxes": tv_tensors.BoundingBoxes(boxes(number, seed=10 * clip + frame), format="XYXY", **canvas),
        "masks": tv_tensors.Mask(painted(boxes(1, 1, 1, seed=10 * clip + frame))[0, 0].expand(number, *SIDES)),
        "frame": (clip, frame),
    }


def nested(element, kind=list):
    """For each clip a list of one element per frame."""
    return kind(kind(element(clip, frame) for frame in range(FRAMES)) for clip in range(BATCH))


def flat(value):
    return [element for clip in value for element in clip]


RECORDS = nested(lambda clip, frame: typed_record((clip + frame) % 3, clip, frame))
POINTS = tv_tensors.KeyPoints(torch.rand(BATCH, FRAMES, 5, 2) * 20, canvas_size=SIDES)
OF_FRAMES = {
    "nested targets": {"targets": RECORDS},
    "flat targets": {"targets": flat(RECORDS)},
    "nested dicts": {"tv_tensors": RECORDS},
    "nested tuples": {"tv_tensors": tuple(map(tuple, RECORDS))},
    "nested boxes": {"tv_tensors": nested(lambda clip, frame: RECORDS[clip][frame]["boxes"])},
    "nested masks and none": {"tv_tensors": nested(lambda clip, frame: RECORDS[clip][frame]["masks"] if frame else None)},
    "nested lists in a dict": {
        "tv_tensors": {"deep": {"er": RECORDS}, "name": 1, "masks": tv_tensors.Mask(torch.rand(BATCH, FRAMES, *SIDES))}
    },
    "keypoints": {"tv_tensors": {"points": POINTS, "of clips": tv_tensors.KeyPoints(POINTS[:, 0], canvas_size=SIDES)}},
    "all of Kornia's keys": {
        "mask": torch.rand(BATCH, FRAMES, 1, *SIDES),
        "keypoints": torch.rand(BATCH, FRAMES, 5, 2) * 20,
        "bbox_xyxy": boxes(BATCH, FRAMES, BOXES),
        "valid": torch.rand(BATCH, FRAMES, BOXES) < 0.7,
    },
}
"""Values by their data keys."""


def chosen(value, indices):
    """A value with a frame axis, or with nested or flat lists, for some of its frames."""
    if isinstance(value, torch.Tensor):
        return tv_tensors.wrap(value[:, indices], like=value) if value.shape[:2] == (BATCH, FRAMES) else value
    if isinstance(value, dict):
        return {key: chosen(each, indices) for key, each in value.items()}
    if not isinstance(value, list | tuple):
        return value
    if len(value) == BATCH * FRAMES:
        return [value[clip * FRAMES + frame] for clip in range(BATCH) for frame in indices]
    return type(value)(type(clip)(clip[frame] for frame in indices) for clip in value)


def assert_alike(got, expected):
    if isinstance(expected, torch.Tensor):
        assert type(got) is type(expected)
        assert_values(got.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor))
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert_alike(got[key], value)
    elif isinstance(expected, list | tuple):
        assert (type(got), len(got)) == (type(expected), len(expected))
        for one, other in zip(got, expected, strict=True):
            assert_alike(one, other)
    else:
        assert got == expected


@pytest.mark.parametrize("name", OF_FRAMES)
def test_annotations_of_frames_in_every_form_are_those_of_the_selected_frames(name):
    keys, values = ["input", *OF_FRAMES[name]], OF_FRAMES[name].values()
    images, moves = videos(), [v2.RandomHorizontalFlip(), v2.RandomCrop((18, 20))]
    few, all_frames = gpuaug.fuse([v2.UniformTemporalSubsample(3), *moves]), gpuaug.fuse(moves)
    for seed in range(2):
        made, *got = few(images, *values, data_keys=keys, draws=few.draw(images.shape, seed=seed))
        whole, *expected = all_frames(images, *values, data_keys=keys, draws=all_frames.draw(images.shape, seed=seed))
        assert_values(made, whole[:, [0, 1, 3]])
        assert_alike(got, [chosen(each, [0, 1, 3]) for each in expected])


@pytest.mark.parametrize("same_on_frame", [True, False])
def test_typed_annotations_of_frames_follow_as_those_that_are_named(same_on_frame):
    images = videos(dtype=torch.float32)
    augment = gpuaug.fuse(K.VideoSequential(K.RandomHorizontalFlip(), K.RandomCrop((16, 20)), same_on_frame=same_on_frame))
    draws = augment.draw(images.shape, seed=1)
    _, got = augment(images, {"nested": RECORDS, "points": POINTS}, draws=draws)
    _, expected = augment(images, RECORDS, data_keys=["input", "targets"], draws=draws)
    assert_alike(got["nested"], expected)
    records = [[{"keypoints": points} for points in clip] for clip in POINTS.as_subclass(torch.Tensor)]
    _, expected = augment(images, records, data_keys=["input", "targets"], draws=draws)
    expected = torch.stack([record["keypoints"] for record in flat(expected)]).view(POINTS.shape)
    assert_values(got["points"].as_subclass(torch.Tensor), expected)
