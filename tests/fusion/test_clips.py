"""Clips, (B, T, C, H, W): one draw for each clip, as Kornia's and torchvision's draw for them."""

import re
from functools import partial

import kornia.augmentation as K
import pytest
import torch
from kornia.augmentation import auto
from support.batches import clips
from support.batches.pairwise import sweep
from support.comparison.replay import as_kornia_takes_them, left_to_kornia
from support.comparison.values import assert_values
from support.ops import pipelines
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug
from gpuaug.fusion.backends import dispatch

PIPELINES = {name: make for group in pipelines.GROUPS for name, make in getattr(pipelines, group).items()} | clips.FIRST


@pytest.mark.parametrize("kind", [K.RandomGaussianNoise, partial(K.RandomSaltAndPepperNoise, 0.5)], ids=["normal", "salt"])
@pytest.mark.parametrize("same_on_batch", [False, True])
def test_noise_of_every_frame_differs(same_on_batch, kind):
    videos = torch.full((4, 8, 1, 16, 16), 0.5)
    got = gpuaug.fuse(kind(p=1.0, same_on_batch=same_on_batch))(videos)
    fields = got[0] if same_on_batch else got.flatten(0, 1)
    assert len({tuple(field.flatten().tolist()) for field in fields}) == len(fields)
    assert torch.equal(got[0], got[1]) is same_on_batch


KORNIA = {
    "crop and colours": lambda: [K.RandomResizedCrop((12, 12)), K.RandomHorizontalFlip(), K.ColorJiggle(0.4, 0.4, 0.4, 0.1)],
    "filters": lambda: [K.RandomClahe(), K.RandomGaussianBlur((3, 3), (0.1, 2.0)), K.RandomErasing(p=1.0), K.RandomGrayscale()],
    "noise": lambda: [K.RandomHorizontalFlip(), K.RandomGaussianNoise(p=0.7)],
    "noise, same": lambda: [K.RandomGaussianNoise(p=0.7, same_on_batch=True)],
    "salt and pepper": lambda: [K.RandomSaltAndPepperNoise(0.4, p=0.7)],
    "salt and pepper, same": lambda: [K.RandomSaltAndPepperNoise(0.4, p=0.7, same_on_batch=True)],
    "warps": lambda: [K.RandomAffine(20.0, (0.1, 0.1)), K.RandomPerspective()],
    "mixup": lambda: [K.RandomMixUpV2(p=1.0), K.RandomInvert()],
    "cutmix": lambda: [K.RandomCutMixV2(p=1.0, use_correct_lambda=True)],
    "mosaic": lambda: [K.RandomMosaic((20, 24), p=0.7), K.RandomBrightness((0.5, 1.5))],
    "jigsaw": lambda: [K.RandomJigsaw((2, 3), p=0.7), K.RandomInvert()],
    "what Kornia runs": lambda: [K.RandomMedianBlur(7), K.RandomRotation(30.0)],
}


@pytest.mark.parametrize(("name", "data_format", "same_on_frame"), sweep(KORNIA, ["BTCHW", "BCTHW"], [True, False]))
@left_to_kornia
def test_video_sequential_replays(name, data_format, same_on_frame):
    videos = clips.clips(3, 4, 3, 20, 24)
    videos = videos.transpose(1, 2).contiguous() if data_format == "BCTHW" else videos
    pipeline = K.VideoSequential(*KORNIA[name](), data_format=data_format, same_on_frame=same_on_frame)
    augment = gpuaug.fuse(pipeline)
    for seed in range(2):
        draws = augment.draw(videos.shape, seed=seed)
        expected = pipeline(as_kornia_takes_them(videos), params=draws.as_kornia())
        assert_values(augment(videos, draws=draws), expected, atol=2e-4, share=1e-3, draws=draws)


PICKED = {
    "mixes": lambda: ([K.RandomMixUpV2(p=1.0), K.RandomCutMixV2(p=1.0, use_correct_lambda=True)], 1),
    "left to Kornia whole": lambda: ([K.RandomMixUpV2(p=1.0), K.RandomInvert(p=0.7), K.RandomVerticalFlip()], 2),
}


@pytest.mark.parametrize(("name", "data_format", "same_on_frame"), sweep(PICKED, ["BTCHW", "BCTHW"], [True, False]))
@left_to_kornia
def test_video_sequential_that_picks_replays(name, data_format, same_on_frame):
    videos = clips.clips(3, 4, 3, 20, 24)
    videos = videos.transpose(1, 2).contiguous() if data_format == "BCTHW" else videos
    modules, count = PICKED[name]()
    pipeline = K.VideoSequential(*modules, random_apply=count, same_on_frame=same_on_frame, data_format=data_format)
    augment = gpuaug.fuse(K.AugmentationSequential(pipeline))
    for seed in range(3):
        draws = augment.draw(videos.shape, seed=seed)
        expected = pipeline(as_kornia_takes_them(videos), params=draws.as_kornia()[0].data)
        assert_values(augment(videos, draws=draws), expected, atol=1e-4, draws=draws)


@pytest.mark.parametrize("same_on_frame", [True, False])
@pytest.mark.parametrize("data_format", ["BTCHW", "BCTHW"])
def test_video_sequential_draws_as_it_says(data_format, same_on_frame):
    videos = clips.still(4, 6, 3, 20, 24)
    videos = videos.transpose(1, 2) if data_format == "BCTHW" else videos
    modules = [K.RandomResizedCrop((9, 9)), K.RandomBrightness((0.5, 1.5), p=1.0)]
    augment = gpuaug.fuse(K.VideoSequential(*modules, data_format=data_format, same_on_frame=same_on_frame))
    for _ in range(3):
        made = augment(videos)
        made = made.transpose(1, 2) if data_format == "BCTHW" else made
        assert made.shape == (4, 6, 3, 9, 9)
        distinct = {tuple(frame.flatten().tolist()) for frame in made.flatten(0, 1)}
        assert len(distinct) == (4 if same_on_frame else 24)


@pytest.mark.parametrize("frames", [1, 5])
def test_a_video_comes_out_as_one(frames):
    augment = gpuaug.fuse(v2.Compose([v2.RandomCrop(16), v2.ToDtype(torch.float32, scale=True)]))
    batch = tv_tensors.Video(clips.clips(2, frames))
    for video, shape in ((batch, (2, frames, 3, 16, 16)), (tv_tensors.Video(batch[0]), (frames, 3, 16, 16))):
        got = augment(video)
        assert type(got) is tv_tensors.Video
        assert got.shape == shape
        assert got.dtype == torch.float32


def test_transforms_left_to_torchvision_are_called_once_for_each_clip():
    seen = []

    def function(clip):
        seen.append(clip.shape)
        return clip.flip(-1)

    videos = clips.clips(2, 4)
    with pytest.warns(gpuaug.GpuAugWarning, match="lower"):
        augment = gpuaug.fuse([v2.RandomInvert(1.0), v2.Lambda(function)])
    got = augment(videos)
    assert seen == [(4, 3, 21, 37)] * 2
    assert_values(got, (255 - videos).flip(-1))


def test_labels_of_clips_are_mixed_with_their_partners():
    videos, labels = clips.clips(4, dtype=torch.float32), torch.arange(4)
    for mix in (v2.MixUp(num_classes=4), v2.CutMix(num_classes=4)):
        augment = gpuaug.fuse(mix)
        draws = augment.draw(videos.shape, seed=0)
        got, shares = augment(videos, labels, data_keys=["input", "class"], draws=draws)
        expected, expected_shares = augment(
            videos[:, 1], labels, data_keys=["input", "class"], draws=augment.draw(videos[:, 1].shape, seed=0)
        )
        assert_values(got[:, 1], expected)
        assert_values(shares, expected_shares)


def test_one_row_serves_all_frames(monkeypatch):
    rows, run = [], dispatch.run

    def noted(plan, images, table, *rest):
        rows.append(len(table))
        return run(plan, images, table, *rest)

    monkeypatch.setattr(dispatch, "run", noted)
    augment = gpuaug.fuse([K.RandomResizedCrop((9, 9)), K.RandomMixUpV2(p=1.0)], views=2)
    augment(clips.clips(3, 5))
    gpuaug.fuse(K.RandomResizedCrop((9, 9)), views=2)(clips.clips(3, 5))
    assert rows == [3, 3, 6]


def test_explain_counts_the_launches_of_images_and_the_bytes_of_all_frames():
    augment = gpuaug.fuse([K.RandomResizedCrop((9, 9)), K.RandomGaussianBlur((3, 3), (0.1, 2.0)), K.ColorJitter(0.4, 0.4)])
    images, videos = augment.explain((6, 3, 20, 24)), augment.explain((2, 3, 3, 20, 24))
    assert [line.read_bytes for line in images.lines] == [line.read_bytes for line in videos.lines]
    assert [line.written_bytes for line in images.lines] == [line.written_bytes for line in videos.lines]
    assert images.launches == videos.launches
    assert str(videos).startswith("clips (2, 3, 3, 20, 24), uint8")


@left_to_kornia
def test_explain_counts_a_call_of_torchvisions_for_each_clip():
    explained = gpuaug.fuse([v2.Lambda(torch.clone)]).explain((2, 3, 3, 20, 24))
    assert "clip by clip, 2 calls a batch" in str(explained)


@left_to_kornia
def test_draws_of_clips_are_told_by_clip():
    augment = gpuaug.fuse([K.RandomRotation(30.0, p=1.0), K.RandomMedianBlur(7, p=1.0)])
    draws = augment.draw((3, 5, 3, 8, 8), seed=0)
    assert draws.shape == (3, 5, 3, 8, 8)
    assert len(draws) == 3
    assert len({draws.of(clip)["RandomRotation_0"]["degrees"] for clip in range(3)}) == 3


def test_cameras_of_one_stage_share_a_draw_and_those_of_two_do_not():
    videos = clips.still(3, 2, 3, 20, 24)
    pipeline = [K.RandomResizedCrop((9, 9)), K.ColorJiggle(0.4, 0.4, 0.4, 0.1)]
    together = [gpuaug.TransformStage(gpuaug.fuse(pipeline), on={"left": "input", "right": "input"})]
    apart = [gpuaug.TransformStage(gpuaug.fuse(pipeline), on=name, name=name) for name in ("left", "right")]
    for stages, alike in ((together, True), (apart, False)):
        batch = {"left": videos, "right": videos.clone(), "action": torch.zeros(3)}
        made = next(iter(gpuaug.StreamedLoader([batch], stages, device="cpu", seed=0)))
        assert made["left"].shape == (3, 2, 3, 9, 9)
        assert torch.equal(made["left"], made["right"]) is alike


def raises(text):
    return pytest.raises(gpuaug.ArgumentError, match=re.escape(text))


def test_empty_batches_of_clips():
    assert gpuaug.fuse(K.RandomResizedCrop((4, 5)))(torch.zeros(0, 3, 3, 8, 8)).shape == (0, 3, 3, 4, 5)
    with pytest.warns(gpuaug.GpuAugWarning, match="lower"):
        augment = gpuaug.fuse([v2.Lambda(lambda clip: clip.flip(-1)), v2.RandomInvert()])
    assert augment(torch.zeros(0, 3, 3, 8, 9)).shape == (0, 3, 3, 8, 9)


def test_policies_of_clips_pick_once_for_each():
    videos = clips.still(8, 3)
    augment = gpuaug.fuse([auto.TrivialAugment()], pick="sample")
    got = augment(videos)
    assert_values(got, got[:, :1].expand_as(got))
    assert len({tuple(change.flatten().tolist()) for change in got[:, 0] - videos[:, 0] / 255}) > 4


@pytest.mark.parametrize("name", clips.all_pipelines())
def test_clips_without_frames_are_refused(name):
    videos = clips.clips()
    augment = gpuaug.fuse(PIPELINES[name]())
    with pytest.raises(gpuaug.ArgumentError, match="at least one frame per clip"):
        augment(videos[:, :0])
    with pytest.raises(gpuaug.ArgumentError):
        augment.draw(videos[:, :0].shape)


@pytest.mark.parametrize("options", [{}, {"same_on_frame": False}, {"data_format": "BCTHW"}], ids=str)
def test_clips_without_frames_are_refused_beside_targets_and_in_video_containers(options):
    augment = gpuaug.fuse(K.VideoSequential(K.RandomHorizontalFlip(), **options))
    videos = torch.rand(2, 3, 0, 12, 14) if "data_format" in options else torch.rand(2, 0, 3, 12, 14)
    for inputs, keys in (((videos,), ["input"]), ((videos, torch.arange(2)), ["input", "class"])):
        with pytest.raises(gpuaug.ArgumentError, match="at least one frame per clip"):
            augment(*inputs, data_keys=keys)
    with pytest.raises(gpuaug.ArgumentError, match="at least one frame per clip"):
        gpuaug.fuse(v2.RandomHorizontalFlip())(tv_tensors.Video(torch.rand(0, 3, 12, 14)))


@pytest.mark.parametrize("same_on_frame", [True, False])
@pytest.mark.parametrize("data_format", ["BTCHW", "BCTHW"])
@pytest.mark.parametrize(
    "modules", [[], [K.RandomMedianBlur(7, p=1.0)], [K.RandomHorizontalFlip(), K.RandomCrop((8, 8))]], ids=len
)
@pytest.mark.filterwarnings("ignore::gpuaug.GpuAugWarning")
def test_labels_of_clips_are_smoothed(modules, data_format, same_on_frame):
    video = K.VideoSequential(K.RandomInvert(), *modules, data_format=data_format, same_on_frame=same_on_frame)
    augment, videos = gpuaug.fuse(video, num_classes=3, label_smoothing=0.3), torch.rand(2, 3, 3, 12, 14)
    expected = torch.eye(3)[[0, 2]] * 0.7 + 0.1
    for labels in (torch.tensor([0, 2]), torch.eye(3)[[0, 2]]):
        torch.testing.assert_close(augment(videos, labels, data_keys=["input", "class"])[1], expected)
    for labels in (torch.arange(5), torch.tensor(0)):
        with pytest.raises(gpuaug.ArgumentError, match=r"class must be \(2,\) or \(2, 3\)"):
            augment(videos, labels, data_keys=["input", "class"])


def test_labels_of_mixed_frames_are_per_frame():
    augment = gpuaug.fuse(K.VideoSequential(K.RandomMixUpV2(p=1.0), same_on_frame=False), num_classes=3)
    videos, keys = torch.rand(2, 3, 3, 12, 14), ["input", "class"]
    assert augment(videos, torch.zeros(6, dtype=torch.long), data_keys=keys)[1].shape == (6, 3)
    with pytest.raises(gpuaug.ArgumentError, match=r"class must be \(6,\) or \(6, 3\)"):
        augment(videos, torch.arange(2), data_keys=keys)


class OwnContainer(K.AugmentationSequential):
    """A container of the user, which overrides a method."""

    def transform_inputs(self, *inputs, **options):
        return super().transform_inputs(*inputs, **options)


class OwnPolicy(auto.RandAugment):
    """A policy of the user, which overrides a method."""

    def transform_inputs(self, *inputs, **options):
        return super().transform_inputs(*inputs, **options)


INVERT, POLICY = K.RandomInvert(p=1.0), auto.RandAugment(1, 5)
CONTAINERS = {
    "random_apply": lambda: K.AugmentationSequential(INVERT, random_apply=1),
    "policies in a video": lambda: K.VideoSequential(POLICY, INVERT, random_apply=1),
    "mixes or none": lambda: K.ImageSequential(K.RandomMixUpV2(), random_apply=(0, 1)),
    "nothing": lambda: K.AugmentationSequential(random_apply=1),
    "patches": lambda: K.PatchSequential(INVERT, grid_size=(2, 2), patchwise_apply=False),
    "patches in a video": lambda: K.VideoSequential(K.PatchSequential(INVERT, grid_size=(2, 2), patchwise_apply=False)),
    "the user's": lambda: OwnContainer(INVERT),
    "the user's policy": lambda: OwnPolicy(1, 5),
    "small frames": lambda: auto.RandAugment(1, 5),
}


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.filterwarnings("ignore")
def test_containers_that_kornia_runs_on_images_only_are_refused_for_clips(name):
    side = 2 if name == "small frames" else 16
    for videos in (torch.rand(2, 3, 3, side, side), torch.rand(1, 1, 3, side, side), torch.rand(0, 2, 3, side, side)):
        for pipeline in (CONTAINERS[name](), [CONTAINERS[name](), K.RandomHorizontalFlip()]):
            augment = gpuaug.fuse(pipeline)
            for seed in range(4):
                with pytest.raises(gpuaug.ArgumentError, match=r"must be fused for clips, got .*\. Pass its modules"):
                    augment.draw(videos.shape, seed=seed, dtype=videos.dtype)
            with pytest.raises(gpuaug.ArgumentError, match="must be fused for clips") as caught:
                augment(videos)
            assert not getattr(caught.value, "__notes__", [])


@pytest.mark.filterwarnings("ignore")
def test_containers_whose_frames_are_drawn_for_one_by_one_run():
    for module in (POLICY, K.ImageSequential(INVERT)):
        video, videos = K.VideoSequential(module, INVERT, random_apply=2, same_on_frame=False), torch.rand(2, 3, 3, 16, 16)
        assert gpuaug.fuse(video)(videos).shape == videos.shape
    video = K.VideoSequential(torch.nn.Sequential(INVERT), INVERT, random_apply=2)
    torch.testing.assert_close(gpuaug.fuse(video)(videos), videos)
