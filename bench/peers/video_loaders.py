"""Random clips of videos, from files to (B, T, 3, size, size) on the device: by gpuaug, DALI and torchcodec."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset

import gpuaug
from bench.data.videos import FRAMES
from bench.harness.optional_rows import MissingError

STRIDE = 4

_SHUFFLED = 64
"""Clips that DALI decodes before the first batch, to draw from. With 1,024 the first batch of 720p takes a minute."""


@dataclass(frozen=True)
class VideoCase:
    """The clips of a case.

    Args:
        paths: The videos.
        batch_size: Clips of a batch.
        frames: Frames of a clip.
        size: Side of the frames in pixels, after they were resized.
        device: Device of the batches.
        workers: Number of DataLoader workers.
    """

    paths: Sequence[str]
    batch_size: int
    frames: int
    size: int
    device: torch.device
    workers: int


class Random(Dataset):
    """Endless random clips, by a function of a path and a position from 0 to 1."""

    def __init__(self, case: VideoCase, read: Callable[[str, float], Any]) -> None:
        self._paths, self._read = case.paths, read

    def __len__(self) -> int:
        return 2**30

    def __getitem__(self, index: int) -> Any:
        rng = random.Random(index)
        return (self._read(rng.choice(self._paths), rng.random()), index)


def resized(clips: Tensor | gpuaug.Ragged, size: int) -> Tensor:
    """Clips (B, T, 3, H, W) uint8 as (B, T, 3, size, size) float16, resized without antialiasing."""
    dtype = torch.float16 if clips.device.type == "cuda" else torch.float32
    return torch.stack([interpolate(clip.to(dtype), (size, size), mode="bilinear") for clip in clips])


def _loader(case: VideoCase, read: Callable[[str, float], Any], **options: Any) -> DataLoader:
    many = {"prefetch_factor": 2, "persistent_workers": True} if case.workers else {}
    return DataLoader(Random(case, read), batch_size=case.batch_size, num_workers=case.workers, **many, **options)


def gpuaug_batches(case: VideoCase, stack: ExitStack, *, backend: Literal["nvdec", "cpu"]) -> Iterator[Tensor]:
    """Endless batches of gpuaug."""
    stage = gpuaug.TransformStage(partial(resized, size=case.size), on=0, name="resize")
    data = _loader(case, partial(read, case.frames), collate_fn=gpuaug.collate_encoded)
    streamed = gpuaug.StreamedLoader(data, [gpuaug.DecodeStage(backend=backend), stage], device=case.device)
    stack.callback(streamed.close)
    for clips, _ in streamed:
        yield clips


def read(frames: int, path: str, at: float) -> Any:
    """A clip of a video at a position from 0 to 1."""
    return gpuaug.read_clip(path, frames, STRIDE, at=at)


def dali_batches(case: VideoCase, _stack: ExitStack) -> Iterator[Tensor]:
    """Endless batches of DALI's ``readers.video``, shuffled, with a clip beginning at each frame.

    Raises:
        MissingError: If DALI is not installed.
    """
    try:
        from nvidia.dali import fn, pipeline_def, types
    except ImportError as error:
        raise MissingError(f"not installed: {error}") from None

    @pipeline_def(batch_size=case.batch_size, num_threads=8, device_id=case.device.index or 0, seed=0, prefetch_queue_depth=2)
    def pipeline() -> Any:
        clips = fn.readers.video(
            device="gpu",
            filenames=list(case.paths),
            sequence_length=case.frames,
            stride=STRIDE,
            step=1,
            random_shuffle=True,
            initial_fill=_SHUFFLED,
            dtype=types.UINT8,
            name="videos",
        )
        resized = fn.resize(clips, size=(case.size, case.size), antialias=False, dtype=types.FLOAT)  # no FLOAT16 from uint8
        return fn.cast(resized, dtype=types.FLOAT16)

    made = pipeline()
    made.build()
    while True:
        (clips,) = made.run(torch.cuda.current_stream(case.device))
        yield torch.from_dlpack(clips.as_tensor()).permute(0, 1, 4, 2, 3)


def torchcodec_batches(case: VideoCase, _stack: ExitStack) -> Iterator[Tensor]:
    """Endless batches that DataLoader workers decode by torchcodec on the CPU.

    Raises:
        MissingError: If torchcodec is not installed, or finds no FFmpeg.
    """
    try:
        from torchcodec.decoders import VideoDecoder
    except (ImportError, RuntimeError) as error:
        raise MissingError(f"not installed: {error}") from None

    def read(path: str, at: float) -> Tensor:
        first = int(at * (FRAMES - (case.frames - 1) * STRIDE))
        decoder = VideoDecoder(path, num_ffmpeg_threads=1, seek_mode="approximate")
        data: Tensor = decoder.get_frames_at(list(range(first, first + case.frames * STRIDE, STRIDE))).data
        return data

    for clips, _ in _loader(case, read, pin_memory=True):
        yield resized(clips.to(case.device, non_blocking=True), case.size)
