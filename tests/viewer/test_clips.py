"""Clips in the figure of ``show``: strips of frames, with what belongs to each frame."""

import kornia.augmentation as K
import pytest
import torch
from support.batches.clips import clips
from support.profiler.viewer import beneath, check, notes, of, rectangles
from torchvision.transforms import v2

import gpuaug
from gpuaug.viewer.annotations import Annotations, Box, Mask, Points, joined_horizontally
from gpuaug.viewer.pixels import shown_frames


@pytest.mark.parametrize(("count", "chosen"), [(1, [0]), (2, [0, 1]), (4, [0, 1, 2, 3]), (16, [0, 5, 10, 15])])
def test_first_and_last_frames_are_among_those_shown(count, chosen):
    assert shown_frames(count) == chosen


def strips(videos, chosen):
    """What the figure has of each clip, given uint8 clips."""
    return [torch.cat([clip[frame].float() / 255 for frame in chosen], -1) for clip in videos]


def test_clips_are_strips_before_and_after():
    videos, chosen = clips(3, 5, 3, 48, 16), (0, 1, 3, 4)
    figure = gpuaug.show(of((videos, torch.arange(3)), gpuaug.fuse(v2.RandomHorizontalFlip(1.0))), n=2)
    check(figure, strips(videos[:2], chosen), strips(videos[:2].flip(-1), chosen))
    assert notes(figure) == ["16x48, 4 of 5 frames"] * 2
    assert beneath(figure) == ["HorizontalFlip"] * 2


@pytest.mark.parametrize("same_on_frame", [True, False])
def test_clips_with_channels_first_are_strips(same_on_frame):
    videos, chosen = clips(2, 3, 3, 12, 16), range(3)
    flip = K.VideoSequential(K.RandomVerticalFlip(p=1.0), data_format="BCTHW", same_on_frame=same_on_frame)
    figure = gpuaug.show(of(videos.transpose(1, 2), gpuaug.fuse(flip)))
    check(figure, strips(videos, chosen), strips(videos.flip(-2), chosen))


def test_annotations_of_each_frame_stand_in_their_frame():
    videos, boxes = clips(2, 2, 3, 12, 16), torch.tensor([[[1.0, 2, 5, 6]], [[3.0, 4, 8, 9]]]).expand(2, 2, 1, 4)
    masks = torch.zeros(2, 2, 1, 12, 16)
    masks[:, 1, :, 3:5] = 1
    batch = {"video": videos, "boxes": boxes, "masks": masks, "points": boxes[..., :2]}
    on = {"video": "input", "boxes": "bbox_xyxy", "masks": "mask", "points": "keypoints"}
    stage = gpuaug.TransformStage(gpuaug.fuse(v2.RandomHorizontalFlip(1.0)), on=on)
    before, after = gpuaug.show(of(batch, stage), n=1).axes
    assert rectangles(before) == [(1, 2, 5, 5), (16 + 3, 4, 6, 6)]
    assert rectangles(after) == [(16 - 6, 2, 5, 5), (32 - 9, 4, 6, 6)]


def test_target_dicts_of_frames_and_of_clips_are_drawn():
    videos, boxes = clips(2, 2, 3, 12, 16), torch.tensor([[1.0, 2, 5, 6]])
    keys = {0: "input", 1: "targets"}
    for targets in ([{"boxes": boxes}] * 2, [[{"boxes": boxes}] * 2] * 2):
        stage = gpuaug.TransformStage(gpuaug.fuse(v2.RandomVerticalFlip(1.0)), on=keys)
        figure = gpuaug.show(of((videos, targets), stage), n=1)
        assert [len(axes.patches) for axes in figure.axes] == [len(figure.axes[0].patches)] * 2
        assert len(figure.axes[0].patches) >= 2


def test_annotations_side_by_side():
    part = Annotations(
        [Box(torch.zeros(4, 2).numpy(), "", 0)],
        [Mask(torch.ones(2, 3, dtype=torch.bool).numpy(), 0)],
        [Points(torch.ones(1, 2).numpy(), 0)],
    )
    made = joined_horizontally([part, part], 3)
    assert [box.corners[0].tolist() for box in made.boxes] == [[0, 0], [3, 0]]
    assert [points.xy[0].tolist() for points in made.points] == [[1, 1], [4, 1]]
    assert [mask.covers.any(0).tolist() for mask in made.masks] == [[True] * 3 + [False] * 3, [False] * 3 + [True] * 3]
