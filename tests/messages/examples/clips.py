"""Advice about clips of videos."""

import sys
from pathlib import Path
from unittest import mock

import kornia.augmentation as K
import torch
from support.messages.registry import example
from support.video.videos import video
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

import gpuaug
from gpuaug.decode.clips import libav
from gpuaug.decode.decoders import nvdec, registry


def frames_of(*clips, **options):
    data = DataLoader([(clip, index) for index, clip in enumerate(clips)], batch_size=8, collate_fn=gpuaug.collate_encoded)
    ((frames, _),) = gpuaug.StreamedLoader(data, [gpuaug.DecodeStage(**options)], device="cpu")
    return frames


@example("Transforms of a dataset must receive decoded images")
def transforms_in_a_dataset_of_clips(told):
    clip = gpuaug.read_clip(video(), 2)
    with told:
        pytree.tree_flatten((clip, 1))  # as torchvision's v2 transforms do
    transform = torch.nn.Identity()
    data = DataLoader([(clip, 0)], collate_fn=gpuaug.collate_encoded)
    ((frames, _),) = gpuaug.StreamedLoader(data, stages=[gpuaug.DecodeStage(), transform], device="cpu")
    assert frames.shape[:2] == (1, 2)


@example("Videos cannot be read, because")
def videos_without_pyav(told):
    absent, too_old = mock.patch.dict(sys.modules, {"av": None}), mock.patch("av.VideoCodecContext", object)
    for patch in (absent, too_old):
        libav.find_module.cache_clear()
        with patch, told:
            gpuaug.collate_encoded([(gpuaug.read_clip(video(), 2), 0)])
    libav.find_module.cache_clear()
    assert frames_of(gpuaug.read_clip(video(), 2)).shape[1] == 2


@example("which may be too slow for a GPU")
def clips_without_engines(told):
    def no_driver():
        raise RuntimeError("libnvcuvid.so.1: cannot open")

    for library in (lambda: None, no_driver):
        with mock.patch.object(nvdec, "library", library):
            with told:
                registry.find_clips("auto", torch.device("cuda", 0))
            registry.find_clips("cpu", torch.device("cuda", 0))
    assert frames_of(gpuaug.read_clip(video(), 2), backend="cpu").shape[1] == 2


@example("with the bytes of the video")
def bytes_of_a_video(told):
    data = Path(video()).read_bytes()
    with told:
        gpuaug.collate_encoded([{"__key__": "0", "mp4": data}])
    assert frames_of(gpuaug.read_clip(data, 2)).shape[:2] == (1, 2)


@example("Augment each batch of clips separately")
def a_list_of_clips(told):
    clips = [frames_of(gpuaug.read_clip(video(), 2, start=start)) for start in (0, 5)]
    f = gpuaug.fuse(torch.nn.Sequential(K.RandomHorizontalFlip(p=1.0)))
    with told:
        f(clips)
    stage = gpuaug.TransformStage(lambda clips: [f(clip) for clip in clips], on="clips")
    (batch,) = gpuaug.StreamedLoader([{"clips": clips}], [stage], device="cpu")
    assert all(torch.equal(*pair) for pair in zip(batch["clips"], [f(clip) for clip in clips], strict=True))


@example("pass clips.transpose(1, 2)")
def clips_with_channels_first(told):
    clips = torch.rand(2, 3, 8, 16, 16)
    f = gpuaug.fuse(torch.nn.Sequential(K.RandomHorizontalFlip(p=1.0)))
    with told:
        f(clips)
    clips = clips.transpose(1, 2)
    assert torch.equal(f(clips), clips.flip(-1))
