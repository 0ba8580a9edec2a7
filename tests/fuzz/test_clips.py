"""A damaged video decodes to PyAV's frames, or is a ``DecodeError``; other clips of its batch stay as they are."""

import io
import math
from unittest import mock

import av
import numpy as np
import pytest
from hypothesis import event, given
from support.public.fuzzing import bounded, cases, outcome
from support.video.damaged_videos import damaged_videos
from support.video.videos import frames, shown, video

import gpuaug
from gpuaug.decode import decoder
from gpuaug.decode.clips import limits

pytestmark = [pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]

NUMBERS = [3, 7, 20, 33]

MOST_PIXELS = limits.MAX_FRAME_PIXELS // 4
"""Limit of the pixels of a frame in these tests: a damaged header may declare as many, and the memory grows with them."""


@pytest.fixture(autouse=True, scope="module")
def smaller_limit():
    with mock.patch.object(limits, "MAX_FRAME_PIXELS", MOST_PIXELS):
        yield


def decoded(data, poison, **options):
    """The frames of two clips of a batch, the second of a damaged video, in memory that held something else."""
    clips = [(gpuaug.read_clip(each, NUMBERS), 0) for each in (video(), data)]
    with mock.patch.object(decoder, "POISON", poison):
        made = gpuaug.DecodeStage(**options)(gpuaug.collate_encoded(clips)[0], "cpu")
    pictures = [frame.permute(1, 2, 0).numpy() for frame in (made if isinstance(made, gpuaug.Ragged) else made.flatten(0, 1))]
    return pictures[: len(NUMBERS)], pictures[len(NUMBERS) :]


def by_pyav(data):
    """The frames of a whole video (H, W, 3), in FFmpeg's order and in that of their times, and its codec; none after an error.

    The two orders differ if times are damaged.
    """
    try:
        with av.open(io.BytesIO(data)) as file:
            context = file.streams.video[0].codec_context
            context.thread_count = 1
            found = list(file.decode(video=0))
        by_time = found if any(frame.pts is None for frame in found) else sorted(found, key=lambda frame: frame.pts)
        orders = [[shown(frame, frame.to_ndarray(format="rgb24")) for frame in order] for order in (found, by_time)]
        return orders, context.codec.canonical_name
    except Exception:
        return [[]], ""


def recorded(seconds, grown):
    """Count files by the power of ten of their time, and of two of their memory, in ``--hypothesis-show-statistics``."""
    event("seconds", f"< {10 ** max(math.ceil(math.log10(seconds + 1e-9)), -2)}")
    event("memory", f"< {2 ** max((grown >> 20).bit_length(), 4)} MiB")


@cases(10)
@given(damaged_videos())
def test_a_damaged_video_decodes_or_is_a_decode_error(data):
    with bounded(recorded, MOST_PIXELS):
        made = outcome(decoded, data, 0x00)
    event(type(made).__name__)
    again = decoded(data, 0xFF, on_error="replace")
    for got, wanted in zip(again[0], frames(video())[NUMBERS], strict=True):
        assert np.array_equal(got, wanted), "a neighbour's pixels"
    if isinstance(made, gpuaug.DecodeError):
        assert "because of sample 1: " in str(made)
        assert np.array_equal(again[1], again[0])
        return
    for got, other in zip(made[1], again[1], strict=True):
        assert np.array_equal(got, other), "some pixels were not written"
    orders, codec = by_pyav(data)
    if len(orders[0]) == 40 and codec != "mpeg4":  # its decoder remembers damage of a header where ours begins behind it
        assert any(all(map(np.array_equal, made[1], [order[number] for number in NUMBERS])) for order in orders)
