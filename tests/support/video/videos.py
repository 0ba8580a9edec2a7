"""Small videos, made by PyAV, and what PyAV decodes of them."""

import functools
import tempfile
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

av.logging.set_level(av.logging.PANIC)

FOLDER = tempfile.TemporaryDirectory(prefix="gpuaug-videos")


def pictures(count, height, width, seed=0):
    """Frames (H, W, 3) that all differ: a texture that moves, and the frame's number in blocks."""
    rng = np.random.default_rng(seed)
    texture = np.kron(rng.integers(0, 256, (height // 4 + 8, width // 4 + 8, 3), np.uint8), np.ones((8, 8, 1), np.uint8))
    for number in range(count):
        picture = texture[number % height :, (3 * number) % width :][:height, :width].copy()
        for bit in range(6):
            picture[:8, 8 * bit : 8 * bit + 8] = 255 if number >> bit & 1 else 0
        yield picture


@functools.cache
def video(
    name="plain.mp4",
    codec="libx264",
    count=40,
    *,
    height=48,
    width=64,
    pixels="yuv420p",
    rotation=0,
    colorspace=None,
    color_range=None,
    times=None,
    options=(("g", "12"), ("bf", "3")),
    container=(),
    seed=0,
):
    """Path of a video, which is the same file in every run.

    Args:
        name: Its name, which decides the container.
        codec: Name of the encoder.
        count: Number of frames.
        rotation: Degrees counterclockwise that display it.
        times: Time of each frame in hundredths of a second; left out, 30 frames a second.
        options: Options of the encoder.
        container: Options of the container.
    """
    path = Path(FOLDER.name) / name
    # Matroska's identifiers are random without bitexact, and x264's macroblock tree reads memory that nothing has written.
    repeatable = {"mbtree": "0"} if codec == "libx264" else {}
    with av.open(str(path), "w", options={"fflags": "+bitexact", **dict(container)}) as file:
        stream = file.add_stream(codec, rate=30, options={**repeatable, **dict(options)})
        stream.codec_context.thread_count = 1  # x264's output depends on the number of threads
        stream.height, stream.width, stream.pix_fmt = height, width, pixels
        context = stream.codec_context
        if colorspace is not None:
            context.colorspace = colorspace
        if color_range is not None:
            context.color_range = color_range
        if times is not None:
            context.time_base = Fraction(1, 100)
        if rotation:
            stream.set_display_rotation(rotation)
        for number, picture in enumerate(pictures(count, height, width, seed)):
            frame = av.VideoFrame.from_ndarray(picture, "rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[number], Fraction(1, 100)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return str(path)


def lossless(name, shown):
    """Path of a video whose frames are decoded to exactly these pictures (H, W, 3)."""
    path = Path(FOLDER.name) / f"{name}.mkv"
    with av.open(str(path), "w") as file:
        stream = file.add_stream("ffv1", rate=30)
        stream.height, stream.width, stream.pix_fmt = *shown[0].shape[:2], "bgr0"
        for picture in shown:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24")))
        file.mux(stream.encode())
    return str(path)


def shown(frame, picture):
    """A decoded picture (H, W, 3) as a player shows it: the display matrix of its frame says where each pixel goes."""
    try:
        matrix = np.frombuffer(bytes(frame.side_data["DISPLAYMATRIX"]), np.int32)
    except KeyError:
        matrix = None
    if matrix is None:
        return picture
    forward = np.sign(matrix[[0, 3, 1, 4]].reshape(2, 2)) * (abs(matrix[[0, 3, 1, 4]].reshape(2, 2)) > 2**15)
    rows, columns = np.indices(picture.shape[:2]).reshape(2, -1)
    x, y = forward @ np.stack([columns, rows])
    x, y = x - x.min(), y - y.min()
    result = np.empty((y.max() + 1, x.max() + 1, 3), picture.dtype)
    result[y, x] = picture[rows, columns]
    return result


@functools.cache
def frames(path, *, upright=True):
    """All frames of a video (N, H, W, 3) as PyAV decodes them one by one, turned and mirrored as players show them."""
    with av.open(path) as file:
        file.streams.video[0].codec_context.thread_count = 1
        decoded = [(frame, frame.to_ndarray(format="rgb24")) for frame in file.decode(video=0)]
    return np.stack([shown(*each) if upright else each[1] for each in decoded])


def times_s(path):
    """Time of each frame as PyAV gives it."""
    with av.open(path) as file:
        return [frame.time for frame in file.decode(video=0)]
