"""Frames of clips that torchvision's UniformTemporalSubsample chooses: the gather reads them by their index."""

import kornia.augmentation as K
import pytest
import torch
from support.batches.clips import clips
from support.comparison import torchvision_replay
from support.comparison.values import assert_values
from torchvision.transforms import v2

import gpuaug

PIPELINES = {
    "alone": lambda count: [v2.UniformTemporalSubsample(count)],
    "first": lambda count: [v2.UniformTemporalSubsample(count), v2.RandomResizedCrop(12), v2.RandomHorizontalFlip()],
    "behind colours": lambda count: [v2.RandomInvert(), v2.RandomSolarize(0.5), v2.UniformTemporalSubsample(count)],
    "behind a mean": lambda count: [v2.RandomCrop(16), v2.ColorJitter(0.4, 0.4), v2.UniformTemporalSubsample(count)],
    "behind a blur": lambda count: [v2.GaussianBlur(3), v2.UniformTemporalSubsample(count), v2.RandomInvert()],
    "before a blur": lambda count: [v2.UniformTemporalSubsample(count), v2.GaussianBlur(3), v2.RandomCrop(12)],
    "twice": lambda count: [v2.UniformTemporalSubsample(count + 1), v2.RandomInvert(), v2.UniformTemporalSubsample(count)],
    "skipped passes": lambda count: [
        v2.RandomAdjustSharpness(2.0, 0.3),
        v2.RandomAutocontrast(0.3),
        v2.RandomRotation(20),
        v2.UniformTemporalSubsample(count),
    ],
}


@pytest.mark.parametrize("count", [1, 3, 7])
@pytest.mark.parametrize("name", PIPELINES)
def test_chosen_frames_replay(name, count):
    videos = clips(3, 5, 3, 20, 24, dtype=torch.float32)
    got = torchvision_replay.assert_replays(v2.Compose(PIPELINES[name](count)), videos, 1, atol=1e-4, share=2e-3)
    assert got.shape[1] == count


@pytest.mark.parametrize("name", PIPELINES)
def test_batches_drawn_together_choose_the_same_frames(name):
    augment, expected = (gpuaug.fuse(PIPELINES[name](3), views=2) for _ in range(2))
    for frames in (5, 8):
        videos = clips(2, frames, 3, 20, 24)
        for _ in range(3):
            state = torch.get_rng_state()
            got = augment(videos)
            torch.set_rng_state(state)
            assert_values(got, expected(videos, draws=expected.draw(videos.shape)))
            assert got.shape[:2] == (4, 3)


def test_frames_are_chosen_in_the_pass_of_the_crop():
    augment = gpuaug.fuse(PIPELINES["first"](2))
    explained = augment.explain((2, 8, 3, 20, 24))
    assert explained.launches == 1
    line = explained.lines[0]
    assert (line.read_bytes, line.written_bytes) == (2 * 8 * 3 * 20 * 24, 2 * 2 * 3 * 12 * 12)
    assert "choose frames" in str(explained)


@pytest.mark.filterwarnings("ignore:.* gpuaug.fuse does not lower")
def test_target_dicts_of_frames_that_are_chosen_twice():
    videos = clips(2, 5, 3, 20, 24, dtype=torch.float32)
    noise = v2.RandomOrder([v2.RandomErasing()] * 5)  # which torchvision runs, between two plans
    augment = gpuaug.fuse([v2.UniformTemporalSubsample(4), noise, v2.UniformTemporalSubsample(2)])
    records = [[{"boxes": torch.ones(1, 4), "frame": frame} for frame in range(5)] for _ in range(2)]
    made, got = augment(videos, records, data_keys=["input", "targets"])
    assert made.shape[1] == 2
    assert [[record["frame"] for record in clip] for clip in got] == [[0, 4]] * 2


@pytest.mark.filterwarnings("ignore:.* gpuaug.fuse does not lower")
def test_frames_are_chosen_between_modules_of_the_libraries():
    videos = clips(2, 6, 3, 20, 24)
    augment = gpuaug.fuse([v2.Lambda(lambda clip: clip.flip(-1)), v2.UniformTemporalSubsample(2), v2.Lambda(lambda clip: clip)])
    assert_values(augment(videos), videos[:, [0, 5]].flip(-1))


def test_noise_of_chosen_frames_differs():
    videos = torch.full((2, 6, 3, 8, 8), 0.5)
    for modules in (
        [v2.UniformTemporalSubsample(4), K.RandomGaussianNoise(p=1.0)],
        [K.RandomGaussianNoise(p=1.0), v2.UniformTemporalSubsample(4)],
    ):
        got = gpuaug.fuse(modules)(videos)
        assert len({tuple(frame.flatten().tolist()) for frame in got.flatten(0, 1)}) == 8


@pytest.mark.filterwarnings("ignore:.* gpuaug.fuse does not lower")
def test_images_have_no_frames_to_choose():
    images = torch.rand(2, 3, 8, 8)
    with pytest.warns(gpuaug.GpuAugWarning, match="it takes clips"):
        assert gpuaug.fuse(v2.UniformTemporalSubsample(2))(images).equal(images)  # as torchvision returns tv_tensors.Image
