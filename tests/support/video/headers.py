"""Videos of every container, and videos whose headers declare much."""

import itertools
import struct
from pathlib import Path

import av
import numpy as np
from support.video.videos import FOLDER, video

PLAIN = ()

CONTAINERS = {
    "MP4": {},
    "QuickTime": {"name": "limits.mov"},
    "fragments": {"name": "limits-fragments.mp4", "container": (("movflags", "frag_keyframe+empty_moov"),)},
    "fragments with an index": {"name": "limits-index.mp4", "container": (("movflags", "dash+global_sidx"),)},
    "Matroska": {"name": "limits.mkv"},
    "WebM": {"name": "limits.webm", "codec": "libvpx", "options": PLAIN},
    "transport stream": {"name": "limits.ts"},
    "program stream": {"name": "limits.mpg", "codec": "mpeg2video", "options": PLAIN},
    "AVI": {"name": "limits.avi", "codec": "mpeg4", "options": PLAIN},
    "WMV": {"name": "limits.wmv", "codec": "wmv2", "options": PLAIN},
    "FLV": {"name": "limits.flv", "codec": "flv", "options": PLAIN, "container": (("flvflags", "add_keyframe_index"),)},
    "NUT": {"name": "limits.nut", "codec": "mpeg4", "options": PLAIN},
    "MXF": {"name": "limits.mxf", "codec": "mpeg2video", "options": PLAIN},
    "RealMedia": {"name": "limits.rm", "codec": "rv10", "options": PLAIN, "height": 144, "width": 176},
    "SWF": {"name": "limits.swf", "codec": "flv", "options": PLAIN},
    "Ogg": {"name": "limits.ogv", "codec": "libvpx", "options": PLAIN},
    "IVF": {"name": "limits.ivf", "codec": "libvpx", "options": PLAIN},
    "GIF": {"name": "limits.gif", "codec": "gif", "options": PLAIN, "pixels": "rgb8"},
    "H.264": {"name": "limits.h264"},
}
"""Arguments of ``video`` per container."""


def file_of(container):
    """The bytes of a video of six frames."""
    return Path(video(**{"name": "limits.mp4", "count": 6, **CONTAINERS[container]})).read_bytes()


def box(name, *contents):
    """A box of an MP4 file, of boxes or bytes."""
    data = b"".join(contents)
    return struct.pack(">I4s", len(data) + 8, name) + data


def boxes(data, start, end):
    """(name, start, end) of the boxes between two offsets."""
    while start + 8 <= end:
        size, name = struct.unpack_from(">I4s", data, start)
        yield name, start, start + size
        start += size


PARENTS = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts", b"moof", b"traf", b"mvex")


def edited(data, change):
    """An MP4 file in which each box that is no parent is what ``change`` returns of its name and bytes."""

    def edit(start, end):
        for name, first, last in boxes(data, start, end):
            if name in PARENTS:
                yield box(name, *edit(first + 8, last))
            else:
                yield change(name, data[first:last])

    return b"".join(edit(0, len(data)))


def table(name, *numbers):
    """A box of 32-bit numbers behind a version and flags of 0."""
    return box(name, struct.pack(f">{len(numbers) + 1}I", 0, *numbers))


def with_tables(**tables):
    """An MP4 file with other tables: name=box, or name=function of the box."""

    def change(name, data):
        new = tables.get(name.decode("latin-1"), data)
        return new(data) if callable(new) else new

    return edited(file_of("MP4"), change)


def with_fragment(*runs, copies=1):
    """A fragmented MP4 file with further runs of samples in its last fragment."""
    data = file_of("fragments")

    def change(name, content):
        return content + b"".join(table(b"trun", count) for count in runs) * copies if name == b"trun" else content

    return edited(data, change)


MANY = 50_000_000


def in_a_description(content):
    """A table of sample descriptions with a box in the first one."""
    size = int.from_bytes(content[16:20], "big")
    inner = table(b"stsz", 1, MANY)
    description = struct.pack(">I", size + len(inner)) + content[20 : 16 + size] + inner
    return box(b"stsd", content[8:16], description)


def hidden_behind_its_box(data):
    """An MP4 file in which a sample description reaches into the next box of the file, which is not searched for tables."""
    at = data.index(b"stsd")
    size = int.from_bytes(data[at + 12 : at + 16], "big")
    return data[: at + 12] + struct.pack(">I", size + len(data) - at) + data[at + 16 :] + box(b"mdat", table(b"stsz", 1, MANY))


def many_tracks(count):
    """An MP4 file with copies of its track."""
    data = file_of("MP4")

    def edit(start, end):
        for name, first, last in boxes(data, start, end):
            content = data[first:last]
            if name == b"moov":
                yield box(name, *edit(first + 8, last))
            else:
                yield content * (count if name == b"trak" else 1)

    return b"".join(edit(0, len(data)))


BOMBS = {
    "samples of one size": lambda: with_tables(stsz=table(b"stsz", 1, MANY), stsc=table(b"stsc", 1, 1, MANY, 1)),
    "samples of one size in 4 bits": lambda: with_tables(stsz=table(b"stz2", 4, MANY)),
    "two tables of sizes": lambda: with_tables(stsz=lambda old: old + table(b"stsz", 1, MANY)),
    "a table in a description": lambda: with_tables(stsd=in_a_description),
    "a table behind its box": lambda: hidden_behind_its_box(file_of("MP4")),
    "a fragment of empty samples": lambda: with_fragment(MANY),
    "many fragments of empty samples": lambda: with_fragment(*[MANY // 100] * 100),
    "edits that repeat all frames": lambda: with_tables(
        elst=table(b"elst", 4000, *itertools.chain(*[(10_000, 0, 65536)] * 4000)),
        stsz=table(b"stsz", 1, 4000),
        stsc=table(b"stsc", 1, 1, 4000, 1),
    ),
    "sound in chunks": lambda: with_tables(
        hdlr=lambda old: old.replace(b"vide", b"soun"),
        stsd=lambda old: old.replace(b"avc1", b"sowt"),
        stts=table(b"stts", 1, MANY, 1),
        stsc=table(b"stsc", 1, 1, 2**31 - 1, 1),
        stco=table(b"stco", 100, *[40] * 100),
    ),
    "a compressed header": lambda: with_tables(mvhd=lambda old: box(b"cmov", old)),
    "items of an image": lambda: file_of("MP4") + box(b"meta", box(b"iinf", struct.pack(">II", 1 << 24, MANY))),
    "tracks": lambda: many_tracks(65),
}
"""MP4 files of a few kilobytes for which FFmpeg's demuxer allocates much, or that hide such tables."""


def with_sound(seconds):
    """Path of a QuickTime file with one frame per second, and uncompressed sound: 48000 samples of one size per second."""
    path = Path(FOLDER.name) / f"sound-{seconds}.mov"
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=1)
        stream.height, stream.width, stream.pix_fmt = 16, 16, "yuv420p"
        sound = file.add_stream("pcm_u8", rate=48000, layout="mono")
        for number in range(seconds):
            picture = av.VideoFrame.from_ndarray(np.full((16, 16, 3), number % 256, np.uint8))
            file.mux(stream.encode(picture))
            samples = av.AudioFrame.from_ndarray(np.zeros((1, 48000), np.uint8), "u8", "mono")
            samples.sample_rate, samples.pts = 48000, 48000 * number
            file.mux(sound.encode(samples))
        file.mux(stream.encode())
    return str(path)
