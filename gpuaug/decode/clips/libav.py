"""The module ``av`` (PyAV, Python bindings of FFmpeg), imported on first use.

A *container* is the file format of a video, or PyAV's object that reads it; FFmpeg's reader of a container is a *demuxer*.
"""

from functools import cache
from typing import Any, BinaryIO

from gpuaug.core.errors import DeviceError
from gpuaug.core.streams import spare_forked_children
from gpuaug.decode.clips import limits

INSTALL = "Run pip install 'gpuaug[video]'"

OLDEST = "18.1"
"""Oldest version of PyAV that can be used: the first whose ``VideoCodecContext`` has the attribute ``field_order``."""

DEMUXERS = (
    *("mov", "matroska", "mpegts", "mpeg", "avi", "asf", "flv", "ogg", "mxf", "ivf", "gif", "nut", "rm", "swf"),
    *("h264", "hevc", "mpegvideo", "m4v"),  # without time stamps
)
"""FFmpeg's names of the demuxers of ``read_clip``: containers that hold the frames, not the names of other files."""


@cache
def find_module() -> Any:
    """Return the module ``av``, or ``None`` if it is not installed, or older than ``OLDEST``."""
    try:
        import av
    except ImportError:
        return None
    if not hasattr(av.VideoCodecContext, "field_order"):
        return None
    spare_forked_children()
    return av


def required_module() -> Any:
    """Return the module ``av``.

    Raises:
        DeviceError: If PyAV is not installed, or too old.
    """
    av = find_module()
    if av is None:
        raise DeviceError(f"Videos cannot be read, because PyAV {OLDEST} or newer is not installed. {INSTALL}.")
    return av


def open_container(file: BinaryIO) -> Any:
    """Open a video, and return PyAV's input container. FFmpeg reads from ``file`` alone.

    Metadata that is not UTF-8 raises no error.

    Args:
        file: The video, at its beginning. It must stay open as long as the container.

    Raises:
        VideoError: If the video has no stream of pictures, or FFmpeg opens it with none of ``DEMUXERS``, or not at all.
    """
    av = required_module()
    # PyAV 19 does not have this option, and never raises for metadata.
    metadata = {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
    options = {
        "format_whitelist": ",".join(DEMUXERS),
        "protocol_whitelist": "none",  # neither files nor servers that a video names
        "max_streams": str(limits.MAX_TRACKS),
        "max_pixels": str(limits.MAX_FRAME_PIXELS),  # of the decoders that FFmpeg opens to find missing header fields
    }
    if file.read(3) == b"FLV":
        options["fflags"] = "+ignidx"  # the demuxer allocates as many key frames as the index declares
    file.seek(0)
    try:
        container = av.open(file, options=options, **metadata)
    except av.error.ArgumentError:  # FFmpeg reports a demuxer that is not allowed in no other way
        raise limits.VideoError(f"its container is none of {', '.join(DEMUXERS)}: {limits.CONVERT}") from None
    except MemoryError:
        raise limits.VideoError(f"it has more than {limits.MAX_TRACKS} tracks, or too little memory is free") from None
    if not container.streams.video:
        raise limits.VideoError("it has no video stream")
    return container


def limit_pixels(context: Any, pixels: int) -> None:
    """Let a decoder that is not open yet raise an error for larger frames, even if the container stores another size."""
    context.options = {**context.options, "max_pixels": str(pixels)}
