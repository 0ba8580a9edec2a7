"""Clips equal PyAV's frames for every codec, container and beginning of a file."""

import copy
import itertools
import pickle
import random
import re
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from support.video import nvdec_double
from support.video.headers import edited
from support.video.videos import FOLDER, frames, video

from gpuaug import DecodeError, DecodeStage, collate_encoded, read_clip
from gpuaug.decode.clips import limits
from gpuaug.decode.clips.video_file import VIDEOS

X265 = "log-level=none:keyint="

CODECS = {
    "h264": ("libx264", {"g": "12", "bf": "3"}),
    "h264 without B-frames": ("libx264", {"g": "12", "bf": "0"}),
    "h264 with one key frame": ("libx264", {"g": "99", "bf": "0"}),
    "h264 with open groups": ("libx264", {"x264-params": "open-gop=1:keyint=9:bframes=3"}),
    "h264 with gradual refresh and B-frames": (
        "libx264",
        {"x264-params": "intra-refresh=1:keyint=12:bframes=2:ref=3:b-pyramid=strict:b-adapt=2:weightp=1:mbtree=0"},
    ),
    "h264 with gradual refresh": ("libx264", {"x264-params": "intra-refresh=1:keyint=12:bframes=0"}),
    "h264 interlaced": ("libx264", {"x264-params": "interlaced=1:keyint=12"}),
    "hevc with open groups": ("libx265", {"x265-params": X265 + "12:bframes=3"}),
    "hevc with short groups": ("libx265", {"x265-params": X265 + "6:bframes=3:open-gop=1"}),
    "hevc with leading frames that are shown": ("libx265", {"x265-params": X265 + "6:bframes=3:open-gop=0:radl=2"}),
    "mpeg1": ("mpeg1video", {"g": "12", "bf": "2"}),
    "mpeg2": ("mpeg2video", {"g": "12", "bf": "2"}),
    "mpeg4": ("mpeg4", {"g": "12", "bf": "2"}),
    "hevc with one key frame": ("libx265", {"x265-params": X265 + "99:bframes=0"}),
    "vp8 with hidden frames": ("libvpx", {"g": "30", "cpu-used": "5", "auto-alt-ref": "1", "lag-in-frames": "16"}),
    "vp9": ("libvpx-vp9", {"g": "12", "cpu-used": "8", "deadline": "realtime"}),
    "av1": ("libsvtav1", {"g": "12", "preset": "12"}),
    **{
        name: (name, {"g": "12", "bf": "0"})
        for name in (
            *("h261", "h263", "h263p", "flv", "wmv1", "wmv2", "msmpeg4", "msmpeg4v2", "svq1", "snow", "rv10", "rv20", "ffv1"),
            *("cinepak", "flashsv", "flashsv2", "qtrle", "msvideo1", "rpza", "roqvideo", "gif", "apng"),
            *("mjpeg", "ljpeg", "jpegls", "rawvideo", "utvideo", "huffyuv", "ffvhuff", "magicyuv", "png", "prores_ks"),
            *("v210", "v308", "v408", "v410", "speedhq", "asv1", "asv2", "cfhd", "libx264rgb", "amv", "zlib"),
        )
    },
}

CONTAINERS = (
    *("mp4", "mov", "3gp", "mkv", "webm", "ts", "mpg", "avi", "wmv", "flv", "nut", "ogg", "mxf", "ivf", "rm", "swf", "m4v"),
    *("gif", "apng", "roq", "h264"),
)

DEFAULT = {
    "h264": ("avi", "wmv", "mkv", "flv"),
    "h264 with open groups": ("ts",),
    "h264 interlaced": ("ts",),
    "hevc with open groups": ("ts",),
    "hevc with short groups": ("mkv",),
    "mpeg2": ("mp4", "mkv", "mpg"),
    "mpeg4": ("avi", "mkv"),
    **dict.fromkeys(("hevc with one key frame", "av1"), ("mp4",)),
    **dict.fromkeys(("vp8 with hidden frames", "vp9"), ("webm",)),
    "h263": ("avi",),
    **dict.fromkeys(("rawvideo", "utvideo"), ("avi",)),
    "qtrle": ("mov",),
}
"""Containers that are tested per default, by the name of the codec."""

REFUSED = rf": {limits.CONVERT}\b"


def encoded(codec, container):
    """Path of a video of 36 frames, or ``None`` if the container does not support the codec."""
    encoder, options = CODECS[codec]
    size = {"height": 144, "width": 176} if encoder.startswith("h26") else {}
    formats = [pixels.name for pixels in av.codec.Codec(encoder, "w").video_formats or ()]
    pixels = next((name for name in ("yuvj420p", "yuv420p") if name in formats), formats[0] if formats else "yuv420p")
    try:
        return video(f"numbered {codec}.{container}", encoder, 36, pixels=pixels, options=tuple(options.items()), **size)
    except (av.error.FFmpegError, ValueError, OSError):
        return None


def copied(path, first, shift=0):
    """Path of a copy of a video from the packet ``first`` on, its time stamps reduced by ``shift`` frames of 1/30 s."""
    target = Path(FOLDER.name) / f"from {first} by {shift} {Path(path).name}"
    with av.open(path) as source, av.open(str(target), "w") as file:
        stream = source.streams.video[0]
        copy_stream = file.add_stream_from_template(stream)
        offset = int(shift / 30 / stream.time_base)
        for packet in itertools.islice((packet for packet in source.demux(stream) if packet.size), first, None):
            packet.pts = None if packet.pts is None else packet.pts - offset
            packet.dts = None if packet.dts is None else packet.dts - offset
            packet.stream = copy_stream
            file.mux(packet)
    return str(target)


def beginnings(path):
    """Yield the video, and copies that begin at a key frame, beside a key frame, and with frames that an edit list hides."""
    yield path
    with av.open(path) as file:
        packets = [packet for packet in file.demux(video=0) if packet.size]
    keys = [number for number, packet in enumerate(packets) if packet.is_keyframe] or [0]
    cuts = [(keys[min(2, len(keys) - 1)], 0), (keys[min(1, len(keys) - 1)] + 3, 0)]
    if path.endswith(("mp4", "mov")):
        cuts.append((0, 7))
    for cut in cuts:
        try:
            yield copied(path, *cut)
        except (av.error.FFmpegError, ValueError, OSError):
            continue  # the container cannot store these packets


def is_equal(path, rng):
    """Whether random clips of a video equal PyAV's frames. Raises ``DecodeError`` if a clip is refused."""
    expected = frames(path)
    count = len(expected)
    lists = [[*range(start, start + 6)] for start in (rng.randrange(count - 5) for _ in range(4))]
    lists += [[0, 1, 2, 3, 4, 5], [rng.randrange(count) for _ in range(6)]]
    data = Path(path).read_bytes()
    clips = [(read_clip(data if number == 4 else path, numbers), 0) for number, numbers in enumerate(lists)]
    decoded = DecodeStage()(collate_encoded(clips)[0], "cpu").permute(0, 1, 3, 4, 2).numpy()
    return all(np.array_equal(clip, expected[numbers]) for clip, numbers in zip(decoded, lists, strict=True))


def frame_count(path):
    """Number of frames that PyAV reads; 0 if it cannot read the file."""
    try:
        return len(frames(path))
    except (av.error.FFmpegError, AttributeError, IndexError, ValueError):
        return 0


@contextmanager
def allowed_to_refuse():
    """Ignore errors that name a way out."""
    try:
        yield
    except DecodeError as error:
        if not re.search(REFUSED, str(error)):
            raise


@pytest.mark.parametrize("codec", [*DEFAULT, *(pytest.param(codec, marks=pytest.mark.slow) for codec in CODECS)])
def test_clips_are_pyavs_frames_or_are_refused(codec, request):
    is_slow = request.node.get_closest_marker("slow")
    containers = CONTAINERS if is_slow else DEFAULT[codec]
    paths = [path for container in containers if (path := encoded(codec, container)) and frame_count(path) >= 6]
    assert paths
    rng = random.Random(0)
    for path in itertools.chain.from_iterable(map(beginnings, paths)):
        if frame_count(path) >= 6:
            with allowed_to_refuse() if is_slow or codec == "mpeg4" else nullcontext():
                assert is_equal(path, rng), path


COLOURS = [("mpeg4", "mkv", 1, 2), ("ffv1", "mkv", 9, 1), ("rawvideo", "mkv", 2, 2), ("mpeg4", "mp4", 1, 2)]


@pytest.mark.parametrize(("codec", "container", "colorspace", "color_range"), COLOURS)
def test_colours_that_only_the_container_stores(codec, container, colorspace, color_range):
    path = video(f"colours-{codec}.{container}", codec, 12, options=(), colorspace=colorspace, color_range=color_range)
    assert is_equal(path, random.Random(0))


def with_packets(name, path, contents):
    """Path of a copy of a video with other packets, at one time stamp after the other."""
    target = Path(FOLDER.name) / name
    with av.open(path) as source, av.open(str(target), "w") as file:
        stream = file.add_stream_from_template(source.streams.video[0])
        packets = (packet for packet in source.demux(video=0) if packet.size)
        for number, (packet, content) in enumerate(zip(packets, contents, strict=True)):
            copy_packet = av.Packet(content)
            copy_packet.pts = copy_packet.dts = number
            copy_packet.time_base = 1 / stream.average_rate if stream.average_rate else packet.time_base
            copy_packet.is_keyframe = packet.is_keyframe
            copy_packet.stream = stream
            file.mux(copy_packet)
    return str(target)


EMPTY = bytes((0, 0, 1, 0xB6, 0b01010000, 0b00100000))
"""Packet of MPEG-4 without a frame: the header of a P-frame that is not coded."""


def test_packets_that_are_changed_by_data_beside_them_are_refused_with_a_way_out():
    path = str(Path(FOLDER.name) / "palette.avi")
    palette = np.arange(1024, dtype=np.uint32).astype(np.uint8).reshape(256, 4)
    with av.open(path, "w") as file:
        stream = file.add_stream("msrle", rate=30)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "pal8"
        for number in range(12):
            picture = np.full((48, 64), 16 * number, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray((picture, palette), "pal8")))
        file.mux(stream.encode())
    refused_and_converted(path, r"its packet 0 changes parameters of the codec \(palette\)")


def flv_tags(path):
    """Yield (bytes of the tag, whether it holds parameter sets) of an FLV file without sound."""
    data = Path(path).read_bytes()
    offset = 13
    while offset < len(data):
        end = offset + 11 + int.from_bytes(data[offset + 1 : offset + 4], "big") + 4
        yield data[offset:end], data[offset] == 9 and data[offset + 12] == 0
        offset = end


def test_parameter_sets_in_the_middle_of_a_file():
    """They are accepted if they are equal to the first ones, as in recordings of live streams."""
    path, other = encoded("h264", "flv"), encoded("h264 without B-frames", "flv")
    tags = [tag for tag, _ in flv_tags(path)]
    for source in (path, other):
        sets = next(tag for tag, holds_sets in flv_tags(source) if holds_sets)
        target = Path(FOLDER.name) / f"repeated {Path(source).name}"
        target.write_bytes(Path(path).read_bytes()[:13] + b"".join([*tags[:20], sets, *tags[20:]]))
        if source == path:
            assert is_equal(str(target), random.Random(0))
        else:
            with pytest.raises(DecodeError, match=rf"changes parameters of the codec \(new_extradata\){REFUSED}"):
                DecodeStage()(collate_encoded([(read_clip(target, 3), 0)])[0], "cpu")


def test_packets_of_mpeg4_with_two_frames():
    """DivX stored a B-frame behind the frame before it in decoding order, and a packet without a frame in its place."""
    path = encoded("mpeg4", "ts")
    with av.open(path) as file:
        packets = [bytes(packet) for packet in file.demux(video=0) if packet.size]
    is_b = [data[:4] == b"\0\0\1\xb6" and data[4] >> 6 == 2 for data in packets]
    assert sum(is_b) > 10
    packed, number = [], 0
    while number < len(packets):
        if number + 1 < len(packets) and is_b[number + 1] and not is_b[number]:
            packed += [packets[number] + packets[number + 1], EMPTY]
            number += 2
        else:
            packed.append(packets[number])
            number += 1
    marked = b"\0\0\1\xb2DivX503b1393p"
    contents = [
        data.replace(b"\0\0\1\xb6", marked + b"\0\0\1\xb6", 1) if data[:4] != b"\0\0\1\xb6" else data for data in packed
    ]
    part = with_packets("packed.avi", path, contents)
    assert len(frames(part)) == 36
    assert is_equal(part, random.Random(0))


def test_a_video_without_time_stamps_is_refused_with_a_way_out():
    refused_and_converted(encoded("h264", "h264"), "its frames have no time stamps")


def test_a_video_with_several_frames_of_one_packet_is_refused_with_a_way_out():
    refused_and_converted(copied(encoded("mpeg4", "mkv"), 13), "FFmpeg decodes several frames from one of its packets")


def test_a_video_in_another_container_is_refused_with_a_way_out():
    refused_and_converted(encoded("apng", "apng"), "its container is none of mov, .*")


def refused_and_converted(path, reason):
    """Check that clips of a video are refused, and that its conversion is read."""
    with pytest.raises(DecodeError, match=f"{reason}{REFUSED}"):
        is_equal(path, random.Random(0))
    expected = frames(path)
    target = f"{path} converted.mp4"
    with av.open(target, "w") as file:
        stream = file.add_stream("libx264", rate=30)
        stream.height, stream.width, stream.pix_fmt = *expected[0].shape[:2], "yuv420p"
        for picture in expected:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24")))
        file.mux(stream.encode())
    assert len(frames(target)) == len(expected)
    assert is_equal(target, random.Random(0))


def test_a_clip_in_bytes_can_be_pickled_and_copied():
    path = video()
    clip = read_clip(Path(path).read_bytes(), [3, 9])
    for same in (pickle.loads(pickle.dumps(clip)), copy.deepcopy(clip), copy.copy(clip)):
        decoded = DecodeStage()(collate_encoded([(same, 0)])[0], "cpu")[0].permute(0, 2, 3, 1).numpy()
        assert np.array_equal(decoded, frames(path)[[3, 9]])


@pytest.mark.parametrize(("codec", "container"), [("h264", "avi"), ("hevc with open groups", "ts"), ("mpeg2", "mpg")])
def test_clips_of_the_engines(monkeypatch, codec, container):
    decoder = nvdec_double.use(monkeypatch)
    expected_on_card = codec != "mpeg2"
    for path in beginnings(encoded(codec, container)):
        clips = [(read_clip(path, 5, start=start), 0) for start in (0, 3, 7)]
        batch = collate_encoded(clips)[0]
        on_card = decoder.takes(batch.headers.table)
        assert on_card[2] == expected_on_card
        decoded = DecodeStage()(batch, "cpu").permute(0, 1, 3, 4, 2).numpy().astype(int)
        expected = np.stack([frames(path)[start : start + 5] for start in (0, 3, 7)])
        assert np.abs(decoded - expected).max() <= (3 if on_card.any() else 0), path


WITHOUT_DECODING = [
    *(("h264", container) for container in ("mp4", "mov", "mkv", "ts")),
    *(("hevc with open groups", "mp4"), ("h264 interlaced", "mp4"), ("vp9", "webm"), ("vp9", "mp4"), ("av1", "mp4")),
]
WITH_DECODING = [
    ("h264", "avi"),
    ("h264", "flv"),
    ("h264 interlaced", "ts"),
    ("mpeg4", "mp4"),
    ("mjpeg", "mov"),
    ("vp9", "avi"),
]


@pytest.mark.parametrize(("codec", "container"), WITHOUT_DECODING + WITH_DECODING)
def test_ordinary_videos_are_numbered_without_decoding(codec, container):
    with VIDEOS.opened(Path(encoded(codec, container)).read_bytes()) as opened:
        assert opened.index.are_decoded == ((codec, container) in WITH_DECODING)


def test_a_range_ends_with_the_packets_without_a_frame_that_follow():
    """They may hold second fields."""
    with VIDEOS.opened(Path(encoded("h264", "mp4")).read_bytes()) as opened:
        last = len(opened.index.stamp) - 1
        halves = opened.index._replace(has_visible_frame=np.arange(last + 1) % 2 == 0)
    assert halves.ranges(np.array([0, 4])) == [(0, 5)]
    assert halves.ranges(np.array([last - 1]))[0][1] == last


@pytest.mark.parametrize("codec", ["h264", "h264 with gradual refresh", "hevc with short groups", "vp9", "av1", "mpeg4"])
def test_an_mp4_file_without_a_table_of_key_frames(codec):
    """Its packets are all marked as key frames."""
    path = encoded(codec, "mp4")
    data = edited(Path(path).read_bytes(), lambda name, content: b"" if name == b"stss" else content)
    clips = [(read_clip(data, [start, start + 1]), 0) for start in range(0, 34, 3)]
    decoded = DecodeStage()(collate_encoded(clips)[0], "cpu").permute(0, 1, 3, 4, 2).numpy()
    for start, clip in zip(range(0, 34, 3), decoded, strict=True):
        assert np.array_equal(clip, frames(path)[[start, start + 1]]), start


def timed_video(name, codec, times_ms, last_ms, **options):
    """Path of a video whose frames are displayed at ``times_ms``, the last for ``last_ms``."""
    path = Path(FOLDER.name) / name
    durations = dict(zip(times_ms, [*np.diff(times_ms).tolist(), last_ms], strict=True))
    with av.open(str(path), "w") as file:
        stream = file.add_stream(codec, rate=30, options=options)
        stream.height, stream.width, stream.pix_fmt = 16, 16, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        packets = []
        for number, time_ms in enumerate(times_ms):
            frame = av.VideoFrame.from_ndarray(np.full((16, 16, 3), 25 * number, np.uint8))
            frame.pts, frame.time_base = time_ms, Fraction(1, 1000)
            packets += stream.encode(frame)
        for packet in [*packets, *stream.encode()]:
            packet.duration = round(durations[round(packet.pts * packet.time_base * 1000)] / 1000 / packet.time_base)
            file.mux(packet)
    return str(path)


X264_IN_ORDER = ("libx264", {"bf": "0"})
X264_REORDERED = ("libx264", {"x264-params": "bframes=2:b-adapt=0:scenecut=0:b-pyramid=none"})


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        *((container, X264_IN_ORDER) for container in ("mp4", "mov", "mkv")),
        ("mkv", X264_REORDERED),
        ("mp4", ("mpeg4", {"bf": "0"})),
        ("webm", ("libvpx-vp9", {"cpu-used": "8", "deadline": "realtime"})),
    ],
)
def test_the_last_frame_is_shown_for_its_duration(container, codec):
    name, options = codec
    for case, (times_ms, last_ms) in enumerate(
        itertools.product(([0], [0, 33, 66], [0, 33, 66, 100], [0, 40, 1000, 1040]), (33, 2000))
    ):
        path = timed_video(f"lasting-{name}-{'x264-params' in options}-{case}.{container}", name, times_ms, last_ms, **options)
        count, last = len(times_ms), len(times_ms) - 1
        wanted = frames(path)
        mean_ms = times_ms[-1] / last if last else 0
        end_ms = times_ms[-1] + max(last_ms, mean_ms)
        within = [time_ms for time_ms in (*times_ms, *range(0, 4000, 170)) if time_ms < end_ms - 2]
        numbers = [int(np.searchsorted(times_ms, time_ms, side="right")) - 1 for time_ms in within]
        shown = clip_of(read_clip(path, times_s=[time_ms / 1000 for time_ms in within]))
        assert np.array_equal(shown, wanted[numbers]), (times_ms, last_ms)
        assert np.array_equal(clip_of(read_clip(path, 1, start_s=end_ms / 1000 - 0.002)), wanted[[last]])
        for beyond_ms in (end_ms + 2, 1e300):
            for choice in ({"times_s": [0, beyond_ms / 1000]}, {"frames": 1, "start_s": beyond_ms / 1000}):
                with pytest.raises(DecodeError, match=f"it has {count} frames, and the clip needs frame"):
                    clip_of(read_clip(path, **choice))
            assert np.array_equal(clip_of(read_clip(path, times_s=[0, beyond_ms / 1000], short="pad")), wanted[[0, last]])


def clip_of(clip):
    """The frames of one clip (T, H, W, 3)."""
    return DecodeStage(threads=1)(collate_encoded([(clip, 0)])[0], "cpu")[0].permute(0, 2, 3, 1).numpy()
