"""Sessions of NVDEC, the video decoding hardware of a GPU (*card*), through the package PyNvVideoCodec.

A *session* is an open decoder for one codec and size. Sessions are kept open in a least-recently-used cache, because a session
is independent of files: after the packets (encoded frames) of one clip, it decodes the next clip of any file with the same
codec and size. It returns one frame per packet, in display order.

PyNvVideoCodec's ``SimpleDecoder`` is not used: it would read the file again, its frames have no time stamps to check, and its
conversion to RGB has one colour matrix for all threads. A call takes many packets, because with one call per packet threads
waited for the interpreter's lock: 8 threads decoded 37 clips of 340x256 per second, and one thread 45 (H100).
"""

import importlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpuaug.core.streams import Lane

SESSIONS_PER_LANE = 3
"""Maximum number of sessions that are kept open per *lane* (CUDA stream). A lane has one session per codec and size."""

CODECS = {"h264": "H264", "hevc": "HEVC", "vp9": "VP9", "av1": "AV1"}
"""FFmpeg's name of a codec → PyNvVideoCodec's name."""


class SessionKey(NamedTuple):
    """Codec of a session, by FFmpeg's name, and height and width of its frames in pixels."""

    codec: str
    height: int
    width: int


@cache
def library() -> Any:
    """Return the module ``PyNvVideoCodec``, or ``None`` if it is not installed. No other file of gpuaug calls the module.

    Raises:
        Exception: Of any type, if the module cannot be loaded with this driver.
    """
    if importlib.util.find_spec("PyNvVideoCodec") is None:
        return None
    module = importlib.import_module("PyNvVideoCodec")
    logging.getLogger("PyNvVideoCodec").setLevel(logging.ERROR)
    return module


def caps(gpu: int, codec: str) -> dict[str, int]:
    """Return the limits of a card's NVDEC for a codec at 8 bits and 4:2:0; an empty dict if it does not decode the codec.

    Args:
        gpu: Index of the device.
        codec: FFmpeg's name of the codec, a key of ``CODECS``.

    Returns:
        Limits, by PyNvVideoCodec's names, such as ``"height_max"``.
    """
    nvc = library()
    chroma = getattr(nvc.cudaVideoChromaFormat, "420")
    try:
        limits: dict[str, int] = nvc.GetDecoderCaps(
            gpuid=gpu, codec=getattr(nvc.cudaVideoCodec, CODECS[codec]), chromaformat=chroma, bitdepth=8
        )
    except Exception:  # raised for codecs that the driver does not know
        return {}
    return limits if limits["supported"] and limits["num_decoder_engines"] else {}


class Session:
    """NVDEC session, used by one thread at a time.

    Args:
        key: Codec and size.
        gpu: Index of the device.
        stream: Handle of the CUDA stream on which frames are written.
    """

    def __init__(self, key: SessionKey, gpu: int, stream: int) -> None:
        nvc = library()
        self._packet = nvc.PacketData
        self._decoder = nvc.CreateDecoder(
            gpuid=gpu,
            codec=getattr(nvc.cudaVideoCodec, CODECS[key.codec]),
            cudacontext=0,
            cudastream=stream,
            usedevicememory=True,
            maxwidth=key.width,
            maxheight=key.height,
            outputColorType=nvc.OutputColorType.NATIVE,
        )

    def feed(self, address: int, size: int) -> list[Any]:
        """Decode packets. Return the frames that are ready, in display order. The next call overwrites these frames.

        Args:
            address: Host address of the first packet.
            size: Number of bytes up to the end of the last packet; 0 to end the clip, and return its remaining frames.
        """
        packet = self._packet()
        packet.bsl_data, packet.bsl = address, size
        frames: list[Any] = self._decoder.Decode(packet)
        return frames


def nv12_of(frame: Any) -> Tensor:
    """Return a (3/2 H, W) uint8 view of the device memory of a frame in the format NV12: luma (H, W), then chroma."""
    return torch.utils.dlpack.from_dlpack(frame)


class SessionPool:
    """Cache of open sessions, per lane (CUDA stream) of one device.

    Args:
        open_session: Function of (key, stream handle) that opens a session.
        max_sessions: Maximum number of open sessions per lane, beyond which the least recently used session is closed.
    """

    def __init__(self, open_session: Callable[[SessionKey, int], Session], max_sessions: int = SESSIONS_PER_LANE) -> None:
        self._open_session, self._max_sessions = open_session, max_sessions
        self._sessions: dict[int | str, OrderedDict[SessionKey, Session]] = {}
        """Stream of a lane (``_stream_key``) → sessions that are open and not in use, the most recently used last."""

    def __len__(self) -> int:
        return sum(map(len, list(self._sessions.values())))

    def take(self, key: SessionKey, lane: Lane) -> Session:
        """Take the session of a lane for ``key`` out of the pool, or open one. Needs no lock: one thread at a time uses a lane.

        Args:
            key: Codec and size.
            lane: Lane on which frames are written. Lanes of later loaders on the same CUDA stream take over its sessions.
        """
        sessions = self._sessions.setdefault(_stream_key(lane), OrderedDict())
        session = sessions.pop(key, None)
        while len(sessions) >= self._max_sessions:  # leaves room to put the taken session back
            sessions.popitem(last=False)  # deleting a session closes it
        return session or self._open_session(key, lane.handle)

    def put(self, key: SessionKey, lane: Lane, session: Session) -> None:
        """Put a session back into the pool, for the next clip of the lane. Do not put back a session that raised an error."""
        self._sessions[_stream_key(lane)][key] = session


def _stream_key(lane: Lane) -> int | str:
    """Return the handle of the lane's CUDA stream; without CUDA (``in_line``), the name of the lane."""
    return lane.name if lane.in_line else lane.handle
