"""Video files that are damaged: bits flipped, bytes overwritten, ends cut off, parts moved."""

import functools

from hypothesis import strategies as st
from support.video.videos import video

KINDS = (
    {},
    {"name": "h264.mkv"},
    {"name": "h264.ts"},
    {"name": "mpeg4.avi", "codec": "mpeg4", "options": (("g", "12"),)},
    {"name": "vp9.webm", "codec": "libvpx-vp9", "options": (("g", "12"), ("cpu-used", "8"), ("deadline", "realtime"))},
    {"name": "hevc.mp4", "codec": "libx265", "options": (("x265-params", "keyint=12:bframes=3:log-level=none"),)},
    {"name": "front.mp4", "container": (("movflags", "faststart"),)},
    {"name": "fragments.mp4", "container": (("movflags", "frag_keyframe+empty_moov"),)},
    {"name": "left.mp4", "rotation": 90},
    {"name": "again.flv", "codec": "flv", "options": (), "container": (("flvflags", "add_keyframe_index"),)},
    {"name": "again.wmv", "codec": "wmv2", "options": ()},
    {"name": "again.mpg", "codec": "mpeg2video", "options": (("bf", "2"),)},
    {"name": "again.mxf", "codec": "mpeg2video", "options": ()},
    {"name": "again.gif", "codec": "gif", "pixels": "rgb8", "options": ()},
)


@functools.cache
def whole(number):
    """The bytes of a video."""
    with open(video(**KINDS[number]), "rb") as file:
        return file.read()


@st.composite
def damaged_videos(draw):
    """The bytes of a damaged video."""
    data = bytearray(whole(draw(st.integers(0, len(KINDS) - 1))))
    # Headers are short, at the front or at the end of a file.
    places = st.one_of(st.integers(0, len(data) - 1), st.integers(0, 400), st.integers(len(data) - 1500, len(data) - 1))
    for _ in range(draw(st.integers(1, 4))):
        at = min(draw(places), len(data) - 1)
        match draw(st.sampled_from(["flip", "flip", "write", "cut", "move", "drop"])):
            case "flip":
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "write":
                new = draw(st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff"]))
                data[at : at + len(new)] = new
            case "cut":
                del data[max(at, 1) :]
            case "move":
                size = draw(st.integers(1, 300))
                part = data[at : at + size]
                del data[at : at + size]
                to = min(draw(places), len(data))
                data[to:to] = part
            case "drop":
                del data[at : at + draw(st.integers(1, 40))]
        if not data:
            return b"\0"
    return bytes(data)
