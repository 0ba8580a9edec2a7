"""Clips of every size: each clip has a size of its own, and all its frames have it."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches.clips import FRAMES, clips, clips_of
from support.comparison.values import assert_values
from torchvision.transforms import v2

import gpuaug


def test_a_ragged_pipeline_takes_clips_of_one_size():
    """As a stage that decodes gives them where all have one."""
    videos = clips(2, FRAMES, 3, 20, 24).permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    ragged, dense = (gpuaug.fuse(v2.RandomResizedCrop(12), ragged=each) for each in (True, False))
    draws = dense.draw(videos.shape, seed=0)
    assert_values(ragged(videos, draws=draws), dense(videos, draws=draws))


@settings(max_examples=8)
@given(data=st.data())
def test_dicts_of_the_frames_of_ragged_clips_equal_one_dict_per_clip(data):
    frames = data.draw(st.integers(2, 4))
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4))
    counts = data.draw(st.lists(st.integers(0, 3), min_size=len(sizes) * frames, max_size=len(sizes) * frames))
    batch = gpuaug.collate_ragged([(torch.randint(256, (frames, 3, *size), dtype=torch.uint8),) for size in sizes])[0]
    per_frame = [
        {
            "boxes": torch.rand(count, 4) * 20,
            "labels": torch.randint(9, (count,)),
            "masks": torch.randint(0, 2, (count, *sizes[index // frames]), dtype=torch.uint8),
            "keypoints": torch.rand(count, 2, 2) * 30,
        }
        for index, count in enumerate(counts)
    ]
    clips = [per_frame[start : start + frames] for start in range(0, len(per_frame), frames)]
    per_clip = [{key: torch.cat([record[key] for record in clip]) for key in clip[0]} for clip in clips]
    augment = gpuaug.fuse([v2.RandomHorizontalFlip(), v2.RandomResizedCrop(12), v2.RandomRotation(20)], ragged=True)
    draws = augment.draw(batch, seed=0)
    _, of_clips = augment(batch, per_clip, data_keys=["input", "targets"], draws=draws)
    _, of_frames = augment(batch, clips, data_keys=["input", "targets"], draws=draws)
    for clip, whole in zip(of_frames, of_clips, strict=True):
        assert len(clip) == frames
        for key, value in whole.items():
            assert_values(torch.cat([record[key] for record in clip]), value)


def test_boxes_as_shares_of_ragged_clips():
    batch = clips_of("hwc")
    shares = torch.tensor([[0.5, 0.5, 0.4, 0.2]])
    augment = gpuaug.fuse(v2.Resize((12, 16)), ragged=True, boxes="cxcywh_share")
    _, got = augment(batch, [{"boxes": shares + index / 50} for index in range(3)], data_keys=["input", "targets"])
    for index, record in enumerate(got):
        assert_values(record["boxes"], shares + index / 50, atol=1e-6)


def test_windows_that_are_read_are_those_of_the_clips():
    batch = clips_of("hwc")
    augment = gpuaug.fuse([v2.RandomResizedCrop(12)], ragged=True)
    windows = augment.windows_read(batch.shapes)
    assert windows.table.shape == (3 * FRAMES, 4)
    assert (windows.table.reshape(3, FRAMES, 4) == windows.table.reshape(3, FRAMES, 4)[:, :1]).all()
    assert len({tuple(row) for row in windows.table.tolist()}) == 3


def test_ragged_clips_are_shown():
    batch = clips_of("hwc")
    loader = gpuaug.StreamedLoader([(batch, torch.arange(3))], [gpuaug.fuse(v2.Resize((12, 14)), ragged=True)], device="cpu")
    figure = gpuaug.show(loader, n=2)
    assert len(figure.axes) == 4
