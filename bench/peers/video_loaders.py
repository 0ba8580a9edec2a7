"""Loaders of random clips, from video files to (B, T, 3, size, size) on the device: gpuaug, DALI and torchcodec."""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset

import gpuaug
from bench.data.videos import FRAMES
from bench.harness.optional_rows import MissingError
from bench.peers.file_loaders import torchcodec_decoders

STRIDE = 4

_SHUFFLE_BUFFER = 64
"""Clips in DALI's shuffle buffer, which is filled before the first batch. With 1,024 clips of 720p that takes a minute."""

_DEVICE_THREADS = 8
"""Threads in which torchcodec decodes on the device, as many as the sessions of the ceiling ``engines, 8``."""


@dataclass(frozen=True)
class VideoCase:
    """Videos of a case, and the form of its batches.

    Args:
        paths: Paths of the videos.
        batch_size: Number of clips in a batch.
        frames: Number of frames in a clip.
        size: Side of the resized frames in pixels.
        device: Device of the batches.
        workers: Number of DataLoader workers.
    """

    paths: Sequence[str]
    batch_size: int
    frames: int
    size: int
    device: torch.device
    workers: int


class RandomClips(Dataset):
    """Random clips: ``read_clip_at`` is called with a random path and a random position in [0, 1)."""

    def __init__(self, case: VideoCase, read_clip_at: Callable[[str, float], Any]) -> None:
        self._paths, self._read_clip_at = case.paths, read_clip_at

    def __len__(self) -> int:
        return 2**30

    def __getitem__(self, index: int) -> Any:
        rng = random.Random(index)
        return (self._read_clip_at(rng.choice(self._paths), rng.random()), index)


def resize_clips(clips: Tensor | gpuaug.Ragged, size: int) -> Tensor:
    """Resize clips (B, T, 3, H, W) uint8 to (B, T, 3, size, size) without antialiasing; float16 on a GPU, float32 on a CPU."""
    dtype = torch.float16 if clips.device.type == "cuda" else torch.float32
    return torch.stack([interpolate(clip.to(dtype), (size, size), mode="bilinear") for clip in clips])


def _data_loader(case: VideoCase, read_clip_at: Callable[[str, float], Any], **options: Any) -> DataLoader:
    worker_options = {"prefetch_factor": 2, "persistent_workers": True} if case.workers else {}
    return DataLoader(
        RandomClips(case, read_clip_at), batch_size=case.batch_size, num_workers=case.workers, **worker_options, **options
    )


def gpuaug_batches(case: VideoCase, stack: ExitStack, *, backend: Literal["nvdec", "cpu"]) -> Iterator[Tensor]:
    """Yield batches of gpuaug, without end."""
    stage = gpuaug.TransformStage(partial(resize_clips, size=case.size), on=0, name="resize")
    data = _data_loader(case, partial(read_clip_at, case.frames), collate_fn=gpuaug.collate_encoded)
    streamed = gpuaug.StreamedLoader(data, [gpuaug.DecodeStage(backend=backend), stage], device=case.device)
    stack.callback(streamed.close)
    for clips, _ in streamed:
        yield clips


def read_clip_at(frames: int, path: str, at: float) -> Any:
    """Read a clip of a video at the position ``at``, in [0, 1)."""
    return gpuaug.read_clip(path, frames, STRIDE, at=at)


def dali_batches(case: VideoCase, _stack: ExitStack) -> Iterator[Tensor]:
    """Yield shuffled batches of DALI's ``readers.video``, without end. A clip may begin at any frame.

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
            initial_fill=_SHUFFLE_BUFFER,
            dtype=types.UINT8,
            name="videos",
        )
        # DALI cannot resize uint8 to FLOAT16.
        resized = fn.resize(clips, size=(case.size, case.size), antialias=False, dtype=types.FLOAT)
        return fn.cast(resized, dtype=types.FLOAT16)

    dali_pipeline = pipeline()
    dali_pipeline.build()
    while True:
        (clips,) = dali_pipeline.run(torch.cuda.current_stream(case.device))
        yield torch.from_dlpack(clips.as_tensor()).permute(0, 1, 4, 2, 3)


def torchcodec_batches(case: VideoCase, stack: ExitStack, *, on_device: bool) -> Iterator[Tensor]:
    """Yield batches of torchcodec, without end: DataLoader workers decode on the CPU, or threads decode on the device.

    Raises:
        MissingError: If torchcodec is not installed, or finds no FFmpeg.
    """
    decoders = torchcodec_decoders()

    def decode_clip(path: str, at: float) -> Tensor:
        start = int(at * (FRAMES - (case.frames - 1) * STRIDE))
        device = case.device if on_device else "cpu"
        decoder = decoders.VideoDecoder(path, num_ffmpeg_threads=1, seek_mode="approximate", device=device)
        data: Tensor = decoder.get_frames_at(list(range(start, start + case.frames * STRIDE, STRIDE))).data
        return data

    if not on_device:
        for clips, _ in _data_loader(case, decode_clip, pin_memory=True):
            yield resize_clips(clips.to(case.device, non_blocking=True), case.size)
        return
    threads = stack.enter_context(ThreadPoolExecutor(_DEVICE_THREADS))
    clips = RandomClips(case, decode_clip)
    starts = range(0, len(clips), case.batch_size)
    batches = ([threads.submit(clips.__getitem__, start + index) for index in range(case.batch_size)] for start in starts)
    queue = deque(islice(batches, 2))  # the threads decode the next batch while the loop resizes this one
    for batch in batches:
        queue.append(batch)
        yield resize_clips(torch.stack([future.result()[0] for future in queue.popleft()]), case.size)
