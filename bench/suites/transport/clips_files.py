"""Random clips from video files to batches on the card: gpuaug, DALI's reader and torchcodec.

    python -m bench run clips_files
    python -m bench clips_files --videos DIR --batch 32

A clip has 16 frames, every fourth from a random start. Videos are H.264 with a key frame every 50 frames, of 340x256 and
1280x720 pixels; frames are resized to 224x224. Videos are made on the first run, in a folder that ``--videos`` keeps. Rates and
ratios are of clips per second, because a step of the ceilings has another number of clips than a batch. Rows:

DALI            fn.readers.video, shuffled, and fn.resize
torchcodec, CPU DataLoader workers decode, the card resizes
torchcodec      eight threads decode on the card, which resizes
gpuaug, CPU     read_clip, and DecodeStage(backend="cpu")
gpuaug          read_clip, and DecodeStage(backend="nvdec")
engines, 8 / 14 8 or 14 sessions decode all frames of a video from memory and drop them (a ceiling): decoded frames per
                second over packets_per_clip, the packets in a clip of gpuaug; decoder_percent is read from nvidia-smi
"""

import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

import gpuaug
from bench.data import videos
from bench.harness import flags, measurement
from bench.harness.optional_rows import OptionalRow, peer_row
from bench.peers import nvdec, video_loaders
from bench.peers.video_loaders import VideoCase
from gpuaug.benchkit.windows import Variant

DALI, TORCHCODEC_CPU, TORCHCODEC, OURS_CPU, OURS = "DALI", "torchcodec, CPU", "torchcodec", "gpuaug, CPU", "gpuaug"

CEILINGS = {"engines, 8": 8, "engines, 14": 14}
"""Name of a ceiling row: its number of sessions."""

_QUEUED = 12
"""Largest number of batches that are ready when a window begins."""

_QUEUED_DALI = 4
"""The same for DALI, which prefetches two. Dropping 12 batches at 720p would take 20 s."""


def _row(name: str, case: VideoCase, stack: ExitStack, batches: Callable[..., Iterator[Tensor]], **options: Any) -> Variant:
    def steps() -> Iterator[int]:
        for clips in batches(case, stack, **options):
            yield len(clips)

    return Variant(name, steps, _QUEUED_DALI if name == DALI else _QUEUED)


def _ceiling_row(name: str, case: VideoCase, sessions: int, stack: ExitStack) -> Variant:
    """Return the row of clips per second if the engines decoded all packets of an average clip without pauses."""
    clips = [video_loaders.read_clip_at(case.frames, path, at / 7) for path in case.paths[: videos.DISTINCT] for at in range(8)]
    encoded = gpuaug.collate_encoded([(clip, 0) for clip in clips])[0]
    packets = len(encoded.headers.packets) / len(encoded)
    engines = nvdec.Engines(case.paths[0], sessions, case.device.index or 0, stack)

    def steps() -> Iterator[int]:
        while True:
            yield round(engines.decode() / packets)

    return Variant(name, steps, 1, lambda: {"packets_per_clip": packets, "decoder_percent": median(engines.percents or [0])})


def variants(options: Namespace, root: Path, size: str, batch_size: int, stack: ExitStack) -> list[OptionalRow]:
    """Return the rows of one size of videos."""
    paths = videos.folder(root, size)
    case = VideoCase(paths, batch_size, options.frames, options.size, options.device, options.workers)
    loader_specs: list[tuple[str, Callable[..., Iterator[Tensor]], dict[str, Any], bool]] = [
        (DALI, video_loaders.dali_batches, {}, True),
        (TORCHCODEC_CPU, video_loaders.torchcodec_batches, {"on_device": False}, False),
        (TORCHCODEC, video_loaders.torchcodec_batches, {"on_device": True}, True),
        (OURS_CPU, video_loaders.gpuaug_batches, {"backend": "cpu"}, False),
        (OURS, video_loaders.gpuaug_batches, {"backend": "nvdec"}, True),
    ]
    loader_rows = [
        peer_row(name, options.device, partial(_row, name, case, stack, batches, **arguments), needs_gpu=needs_gpu)
        for name, batches, arguments, needs_gpu in loader_specs
    ]
    ceiling_rows = [
        peer_row(name, options.device, partial(_ceiling_row, name, case, count, stack)) for name, count in CEILINGS.items()
    ]
    return [*loader_rows, *ceiling_rows]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("clips_files", __doc__, batch="32", size=224, seconds=4.0, repeats=3)
    parser.add_argument("--videos", type=Path, metavar="DIR", help="folder to keep the videos in (default: a temporary one)")
    parser.add_argument("--sizes", default=",".join(videos.SIZES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--frames", type=int, default=16, help="frames of a clip (default: %(default)s)")
    options = flags.parse(parser, argv)
    with tempfile.TemporaryDirectory() as folder:
        root = options.videos or Path(folder)
        return measurement.measure(
            "clips_files",
            options,
            [
                ({"case": size, "batch_size": batch_size}, partial(variants, options, root, size, batch_size))
                for size in options.sizes.split(",")
                for batch_size in options.batch
            ],
            baseline=DALI,
            ours=(OURS_CPU, OURS),
            ceilings=tuple(CEILINGS),
            figures=lambda _row: {},
            sample="clip",
            frames=options.frames,
            stride=video_loaders.STRIDE,
        )
