"""No video takes memory or time beyond the documented limits, or has another file opened."""

import io
import os
import random
import socket
from pathlib import Path

import av
import numpy as np
import pytest
from support.files.encoded_files import jpeg
from support.public.fuzzing import bounded
from support.video.headers import BOMBS, CONTAINERS, MANY, file_of, table, with_sound, with_tables
from support.video.videos import frames, video

import gpuaug
from gpuaug import DecodeError, DecodeStage, collate_encoded, read_clip, read_encoded
from gpuaug.decode.clips import libav, limits, mp4
from gpuaug.decode.clips.video_file import VIDEOS

pytestmark = pytest.mark.timeout(120)


def unrecorded(*_):
    """Of ``bounded``: its bounds are enough."""


def decoded(clip):
    return DecodeStage(threads=1)(collate_encoded([(clip, 0)])[0], "cpu")[0].permute(0, 2, 3, 1).numpy()


def read_index(data):
    """Read the index of a video in bytes. Return the reason why it is refused, or an empty string."""
    try:
        with VIDEOS.opened(data) as opened:
            _ = opened.index
    except limits.VideoError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", BOMBS)
def test_tables_that_declare_more_than_a_file_holds_are_refused_before_ffmpeg_reads_them(name):
    data = BOMBS[name]()
    with bounded(unrecorded), pytest.raises(DecodeError, match=r"its headers (declare|are)|tracks, more than"):
        decoded(read_clip(data, 1))
    assert len(data) < 100_000


@pytest.mark.parametrize("name", [name for name in CONTAINERS if name != "H.264"])
def test_containers_of_the_list_are_read_in_files_and_in_memory(name):
    data = file_of(name)
    path = video(**{"name": "limits.mp4", "count": 6, **CONTAINERS[name]})
    assert read_index(data) == ""
    assert np.array_equal(decoded(read_clip(path, [0, 3])), decoded(read_clip(data, [0, 3])))


def test_sound_of_one_sample_per_time_unit_is_no_bomb():
    path = with_sound(400)  # 19 million samples
    assert np.array_equal(decoded(read_clip(path, [3])), frames(path)[[3]])


SWEPT = (b"\0\xff\xff\xff", b"\x0f\xff\xff\xff", b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\xff\x0f\xff\x0f")


def swept(name, count=None):
    """Copies of a video in which four bytes of its headers declare much. ``count``: number of offsets; ``None``: all."""
    data = file_of(name)
    offsets = sorted({*range(min(700, len(data) - 4)), *range(max(len(data) - 900, 0), len(data) - 4)})
    rng = random.Random(name)
    for offset in offsets if count is None else rng.sample(offsets, count):
        for value in SWEPT if count is None else rng.sample(SWEPT, 2):
            yield data[:offset] + value + data[offset + 4 :]


MAX_DECLARED = limits.MAX_FRAME_PIXELS // 4
"""Pixels of a frame that a video may be decoded to if four bytes of its headers declare another size."""


@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [12, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CONTAINERS)
def test_headers_that_declare_much_take_little(name, count):
    for data in swept(name, count):
        with bounded(unrecorded, MAX_DECLARED):
            read_index(data)


@pytest.mark.parametrize("name", [b"times", b"filepositions"])
def test_an_index_of_flv_that_declares_many_key_frames_takes_little(name):
    data = bytearray(file_of("FLV"))
    at = data.index(name) + len(name) + 1
    data[at : at + 4] = b"\x0f\xff\xff\xff"
    with bounded(unrecorded):
        assert read_index(bytes(data)) == ""


def test_a_frame_beyond_the_limit_is_refused_before_it_is_decoded(monkeypatch):
    huge = bytearray(file_of("GIF"))
    huge[6:10] = b"\xff\x7f\xff\x7f"  # 32767x32767
    with bounded(unrecorded):
        assert read_index(bytes(huge))
    monkeypatch.setattr(limits, "MAX_FRAME_PIXELS", 64 * 48 - 1)
    assert "64x48 pixels are more than 3071" in read_index(file_of("MP4"))


def test_packets_that_overlap_are_read_a_bounded_number_of_times():
    with av.open(io.BytesIO(file_of("MP4"))) as file:
        first = next(packet for packet in file.demux(video=0))
        position, size = first.pos, first.size
    count = 20_000  # copies of the first frame
    data = with_tables(
        stsz=table(b"stsz", 0, count, *[size] * count),
        stsc=table(b"stsc", 1, 1, 1, 1),
        stts=table(b"stts", 1, count, 512),
        stco=table(b"stco", count, *[position] * count),
        **dict.fromkeys(("ctts", "stss", "elst"), b""),
    )
    assert count * size > 20 * len(data)
    assert "times as many bytes as the file" in read_index(data)


PRIVATE = "private.ts"

PLAYLIST = "#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\n{0}\n#EXT-X-ENDLIST\n"

LISTS = {
    "concat.mp4": "ffconcat version 1.0\nfile '" + PRIVATE + "'\n",
    "a.ffconcat": "ffconcat version 1.0\nfile '" + PRIVATE + "'\n",
    "hls.m3u8": PLAYLIST.format(PRIVATE),
    "absolute.mp4": PLAYLIST.format("file://{folder}/" + PRIVATE),
    "manifest.mpd": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" '
    'mediaPresentationDuration="PT1S"><Period><AdaptationSet mimeType="video/mp2t"><Representation id="1" bandwidth="1">'
    "<BaseURL>" + PRIVATE + "</BaseURL></Representation></AdaptationSet></Period></MPD>",
    "session.sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n"
    "a=rtpmap:96 H264/90000\n",
    "subtitles.idx": "# VobSub index file, v7\nid: en, index: 0\ntimestamp: 00:00:00:000, filepos: 000000000\n",
    "script.avs": 'AVISource("' + PRIVATE + '")\n',
    "metadata.txt": ";FFMETADATA1\ntitle=x\n",
    "smil.ism": '<SmoothStreamingMedia MajorVersion="2"><StreamIndex Type="video" Url="'
    + PRIVATE
    + '"/></SmoothStreamingMedia>',
    "tee.mp4": "#EXTM3U\n#EXT-X-STREAM-INF:BANDWIDTH=1\nother.m3u8\n",
}
"""Text files that name other files, for a demuxer of FFmpeg."""

PATHS = (
    "concat:{0}|{0}",
    "subfile,,start,0,end,0,,:{0}",
    "file:{0}",
    "crypto:{0}",
    "cache:{0}",
    "async:{0}",
    "data:video/mp2t,x",
)
PATHS += (
    "http://127.0.0.1:9/x.ts",
    "tcp://127.0.0.1:9",
    "pipe:0",
    "fd:0",
    "{folder}/%03d.png",
    "{folder}/*.png",
    "lavfi:testsrc",
)
"""Paths that FFmpeg does not open as the file of this name."""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / PRIVATE).write_bytes(file_of("transport stream"))
    for number in range(3):
        av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8)).to_image().save(tmp_path / f"{number:03d}.png")
    (tmp_path / "subtitles.sub").write_bytes(file_of("program stream"))
    for name, content in LISTS.items():
        (tmp_path / name).write_text(content.replace("{folder}", str(tmp_path)))
    return tmp_path


@pytest.mark.parametrize("allowed", [False, True], ids=["by the list", "by any demuxer"])
@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_other_files_is_refused(name, allowed, folder, monkeypatch):
    if allowed:  # then no other file is opened either
        monkeypatch.setattr(libav, "DEMUXERS", ("concat", "hls", "dash", "sdp", "vobsub", "ffmetadata", "image2", "mpegts"))
    for source in (folder / name, (folder / name).read_bytes()):
        with pytest.raises(DecodeError, match="because of sample 0"):
            decoded(read_clip(source, 1))


@pytest.mark.parametrize("path", PATHS)
def test_a_path_is_the_name_of_a_file_and_no_protocol(path, folder):
    with pytest.raises(DecodeError, match=r"\[Errno 2\] No such file"):
        decoded(read_clip(path.format(folder / PRIVATE, folder=folder), 1))
    odd = folder / (path.format("a", folder="b").replace("/", "_") + ".ts")
    odd.write_bytes((folder / PRIVATE).read_bytes())
    assert np.array_equal(decoded(read_clip(odd, 1)), decoded(read_clip(folder / PRIVATE, 1)))


def fifo(folder):
    os.mkfifo(folder / "fifo")
    return folder / "fifo"


def link_to_fifo(folder):
    (folder / "link").symlink_to(fifo(folder))
    return folder / "link"


def unix_socket(folder):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket"))
    return folder / "socket"


NOT_REGULAR = {
    "a FIFO": fifo,
    "a link to a FIFO": link_to_fifo,
    "a socket": unix_socket,
    "a device without an end": lambda _: "/dev/zero",
    "a device": lambda _: "/dev/null",
    "a terminal": lambda _: "/dev/ptmx",
    "a folder": lambda folder: folder,
}


@pytest.mark.skipif(os.name != "posix", reason="needs FIFOs")
@pytest.mark.parametrize("name", NOT_REGULAR)
def test_a_path_of_no_regular_file_is_an_error_at_once(name, tmp_path):
    path = NOT_REGULAR[name](tmp_path)
    for value in (read_clip(path, 1), read_encoded(path), Path(path)):
        with pytest.raises(DecodeError, match=r"not a regular file|Is a directory"):
            DecodeStage()(collate_encoded([(value, 0)])[0], "cpu")
    with pytest.raises((OSError, DecodeError), match=r"not a regular file|Is a directory"):
        _ = read_encoded(path).height


def test_a_file_that_becomes_a_fifo_is_an_error_at_once(tmp_path, monkeypatch):
    path = tmp_path / "image.jpg"
    path.write_bytes(jpeg(16, 16))
    status = os.stat(path)
    path.unlink()
    os.mkfifo(path)
    with monkeypatch.context() as patch:
        stat = os.stat
        patch.setattr(os, "stat", lambda name, **options: status if str(name) == str(path) else stat(name, **options))
        for value in (read_encoded(path), read_clip(path, 1)):
            assert "not a regular file" in collate_encoded([(value, 0)])[0].headers.problems[0]


def test_the_size_of_a_large_file_is_not_read(tmp_path):
    path = tmp_path / "image.jpg"
    path.write_bytes(jpeg(16, 16))
    os.truncate(path, 2**40)
    with pytest.raises(DecodeError, match="exceed the limit"):
        _ = gpuaug.read_encoded(path).height


def test_a_bomb_does_take_memory_without_the_limits(monkeypatch):
    monkeypatch.setattr(mp4, "check", lambda file, size: file.seek(0))
    count = MANY // 50
    taken = []
    with bounded(lambda *measured: taken.extend(measured)):
        read_index(with_tables(stsz=table(b"stsz", 1, count), stsc=table(b"stsc", 1, 1, count, 1)))
    assert taken[1] == 0 or taken[1] > 20 * 2**20
