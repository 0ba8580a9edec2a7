"""Which frame of a clip is displayed at a time, and how it is displayed."""

import itertools
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from support.video import nvdec_double
from support.video.videos import FOLDER, frames, times_s, video

from gpuaug import ArgumentTypeError, DecodeError, DecodeStage, collate_encoded, read_clip

X265 = ("x265-params", "keyint=12:bframes=3:log-level=none")


def decoded(clip, **options):
    """The frames of a clip as an array (1, T, H, W, 3)."""
    return DecodeStage(**options)(collate_encoded([(clip, 0)])[0], "cpu").permute(0, 1, 3, 4, 2).numpy()


@pytest.mark.parametrize("rate", [24, 25, 30, 50, 59.94, 120])
def test_times_in_float32_find_the_frames_of_float64(rate):
    count = 2**18
    times, rng = np.arange(count) / rate, np.random.default_rng(0)
    numbers = np.sort(rng.integers(0, count, 4000))
    numbers = numbers[times[numbers] < 4 * 3600]  # later, numbers of float32 are a millisecond apart
    requested = {
        "float64": times[numbers].tolist(),
        "float32": times[numbers].astype(np.float32),
        "a tensor": torch.from_numpy(times[numbers]).float(),
        "computed in float32": torch.from_numpy(numbers).float() / rate,
        "multiplied in float32": torch.from_numpy(numbers).float() * (1 / rate),
        "between frames": torch.from_numpy((numbers + 0.5) / rate).float(),
    }
    for name, values in requested.items():
        clip = read_clip("a.mp4", times_s=values)
        assert np.array_equal(clip.numbers_in(count, (times, times[-1] + 1 / rate)), numbers), name
    for number in numbers[::400]:
        clip = read_clip("a.mp4", 1, start_s=np.float32(times[number]))
        assert clip.numbers_in(count, (times, times[-1])).tolist() == [number]


def test_a_single_time_is_refused_with_the_form_of_a_list():
    with pytest.raises(ArgumentTypeError, match=r"times_s must be a list of numbers, got 0\.5"):
        read_clip("a.mp4", times_s=0.5)


def test_a_time_before_the_first_frame_is_an_error():
    path = video("h264.ts")
    first, *_, last = times_s(path)
    wanted = frames(path)
    expected = r"its first frame is displayed at 0\.0666667 s, and the clip needs the frame at .* s: pass later times"
    for choice in ({"times_s": [first, 0]}, {"start_s": first - 0.001}, {"start_s": -1e300}):
        with pytest.raises(DecodeError, match=expected):
            decoded(read_clip(path, 2, **choice))
    assert np.array_equal(decoded(read_clip(path, times_s=[0, first, last, 99], short="pad"))[0], wanted[[0, 0, 39, 39]])
    assert np.array_equal(decoded(read_clip(path, 4, start_s=first - 1.5 / 30, short="pad"))[0], wanted[[0, 0, 0, 1]])
    assert np.array_equal(decoded(read_clip(path, 4, start_s=first - 1.5 / 30, short="loop"))[0], wanted[[38, 39, 0, 1]])
    assert np.array_equal(decoded(read_clip(path, times_s=[first - 5e-5]))[0], wanted[:1])


JOINED = {
    "program streams": {"name": "joined.mpg", "codec": "mpeg2video", "options": (("bf", "2"),)},
    "transport streams": {"name": "joined.ts"},
    "transport streams without B-frames": {"name": "joined0.ts", "options": (("bf", "0"),)},
    "transport streams of HEVC": {"name": "joined-hevc.ts", "codec": "libx265", "options": (X265,)},
}


OVERLAPPING = [range(0, 48, 4), range(18, 66, 4)]
"""Times of the frames of two parts, in hundredths of a second."""


def test_parts_whose_times_overlap_are_numbered_in_the_order_of_the_file(tmp_path):
    parts = [video(f"part{seed}.ts", count=12, seed=seed, times=tuple(times)) for seed, times in enumerate(OVERLAPPING)]
    path = tmp_path / "overlapping.ts"
    path.write_bytes(continued(b"".join(Path(part).read_bytes() for part in parts)))
    assert np.array_equal(decoded(read_clip(path, 24))[0], frames(str(path)))


def continued(data):
    """A transport stream whose packets are counted on, so that no packet seems to be lost where streams were joined."""
    data, counts = bytearray(data), {}
    for at in range(0, len(data), 188):
        track = int.from_bytes(data[at + 1 : at + 3], "big") & 0x1FFF
        counts[track] = counts.get(track, -1) + (data[at + 3] >> 4 & 1)
        data[at + 3] = data[at + 3] & 0xF0 | counts[track] & 0x0F
    return bytes(data)


@pytest.mark.parametrize("count", [5, 12, 40])
@pytest.mark.parametrize("case", JOINED)
@pytest.mark.every(2)
def test_time_stamps_that_begin_again_give_the_right_frame_or_an_error(case, count, tmp_path):
    options = {**JOINED[case], "name": f"{count}-{JOINED[case]['name']}", "count": count}
    first = Path(video(**options)).read_bytes()
    other = Path(video(**{**options, "name": f"other-{options['name']}", "seed": 1})).read_bytes()
    for name, data in {"twice": first * 2, "other": first + other + first}.items():
        path = tmp_path / f"{name}-{options['name']}"
        path.write_bytes(continued(data) if path.suffix == ".ts" else data)
        wanted, starts = frames(str(path)), times_s(str(path))
        got = decoded(read_clip(path, [*range(len(wanted))]))[0]
        assert np.array_equal(got, wanted), "by number, all frames are found"
        for time_s in starts[:: max(len(starts) // 7, 1)]:
            with suppress(DecodeError):
                got = decoded(read_clip(path, times_s=[time_s + 0.001]))[0, 0]
                right = [index for index, start in enumerate(starts) if abs(start - time_s) < 1e-6]
                assert any(np.array_equal(got, wanted[index]) for index in right)
    with pytest.raises(DecodeError, match="its time stamps begin again: pass start, at or a list of frames to read_clip"):
        decoded(read_clip(path, 2, start_s=starts[1]))
    assert np.array_equal(decoded(read_clip(path, 2, start=1))[0], wanted[1:3])


def with_matrix(a, b, c, d):
    """Path of a video of 64x48 pixels with a display matrix: the pixel at (x, y) is shown at (a x + c y, b x + d y)."""
    data = bytearray(Path(video()).read_bytes())
    place = data.index(b"tkhd") + 44
    data[place : place + 36] = struct.pack(">9i", *(round(value * 2**16) for value in (a, b, 0, c, d, 0, 0, 0)), 2**30)
    path = Path(FOLDER.name) / f"matrix {a} {b} {c} {d}.mp4"
    path.write_bytes(data)
    return str(path)


SIGNS = list(itertools.product((1, -1), repeat=2))
MATRICES = [*((a, 0, 0, d) for a, d in SIGNS), *((0, b, c, 0) for b, c in SIGNS)]


@pytest.mark.parametrize("scale", [1, 2, 0.5])
@pytest.mark.parametrize("matrix", MATRICES)
def test_frames_are_turned_and_mirrored_as_players_show_them(matrix, scale, monkeypatch):
    path = with_matrix(*(scale * value for value in matrix))
    wanted, stored = frames(with_matrix(*matrix))[:2], frames(video())[:2]
    assert np.array_equal(decoded(read_clip(path, 2))[0], wanted)
    assert np.array_equal(decoded(read_clip(path, 2), exif=False)[0], stored)
    decoder = nvdec_double.use(monkeypatch)
    assert decoder.takes(collate_encoded([(read_clip(path, 2), 0)])[0].headers.table).all()
    for options, expected in (({}, wanted), ({"exif": False}, stored)):
        got = decoded(read_clip(path, 2), **options)[0]
        assert np.abs(got.astype(int) - expected).max() <= 3


SKEWED = [(0.7, 0.7, -0.7, 0.7), (1, 0.5, 0, 1), (1, 0, 0.3, 1), (1, 1, 1, 1), (0, 1, 0, 1), (1, 0.02, -0.02, 1)]


@pytest.mark.parametrize("matrix", SKEWED)
def test_other_display_matrices_are_an_error(matrix):
    with pytest.raises(DecodeError, match="its display matrix rotates by other than a multiple of 90 degrees, or skews: conv"):
        decoded(read_clip(with_matrix(*matrix), 2))
