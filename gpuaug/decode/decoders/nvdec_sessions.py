"""NVDEC sessions through PyNvVideoCodec, opened per codec and size, and kept open in a least-recently-used cache.

No other file calls PyNvVideoCodec.

A session is independent of files: the end of a clip ends its stream, and the session then decodes the next clip of any file
with the same codec and size. It returns one frame per packet, in display order.

PyNvVideoCodec's ``SimpleDecoder`` is not used: it would read the file again, its frames have no time stamps to check, and its
conversion to RGB has one colour matrix for all threads. One call per packet made threads wait for the interpreter's lock (H100,
340x256: 37 clips per second with 8 threads, 45 with one), so a call takes many packets.
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
"""Number of sessions that a lane keeps open: pairs of codec and size that its clips alternate between."""

CODECS = {"h264": "H264", "hevc": "HEVC", "vp9": "VP9", "av1": "AV1"}
"""PyNvVideoCodec's name of each codec, by FFmpeg's name."""


class SessionKey(NamedTuple):
    """Codec and size of a session."""

    codec: str
    height: int
    width: int


class Caps(NamedTuple):
    """Limits of the engines for one codec at 8 bits and 4:2:0."""

    least: tuple[int, int]
    """Minimum height and width in pixels."""
    most: tuple[int, int]
    """Maximum height and width in pixels."""
    most_blocks: int
    """Maximum number of blocks of 16x16 pixels."""


@cache
def library() -> Any:
    """Return the module ``PyNvVideoCodec``, or ``None`` if it is not installed.

    Raises:
        Exception: Any type, if the module cannot be loaded with this driver.
    """
    logger = logging.getLogger("PyNvVideoCodec")
    if importlib.util.find_spec("PyNvVideoCodec") is None:
        return None
    module = importlib.import_module("PyNvVideoCodec")
    logger.setLevel(logging.ERROR)
    return module


def caps(gpu: int, codec: str) -> Caps | None:
    """Return the limits of a card's engines for a codec, or ``None`` if the engines do not decode it."""
    nvc = library()
    chroma = getattr(nvc.cudaVideoChromaFormat, "420")
    try:
        limits = nvc.GetDecoderCaps(
            gpuid=gpu, codec=getattr(nvc.cudaVideoCodec, CODECS[codec]), chromaformat=chroma, bitdepth=8
        )
    except Exception:  # raised for codecs that the driver does not know
        return None
    if not limits["supported"] or not limits["num_decoder_engines"]:
        return None
    return Caps((limits["height_min"], limits["width_min"]), (limits["height_max"], limits["width_max"]), limits["mb_num_max"])


class Session:
    """NVDEC session, used by one thread at a time.

    Args:
        key: Codec and size.
        gpu: Index of the device.
        stream: Handle of the CUDA stream that frames are written on.
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
        """Feed packets. Return the frames that are ready, in display order. The next call overwrites their memory.

        Args:
            address: Host address of the first packet.
            size: Number of bytes up to the end of the last packet.
        """
        packet = self._packet()
        packet.bsl_data, packet.bsl = address, size
        frames: list[Any] = self._decoder.Decode(packet)
        return frames

    def end(self) -> list[Any]:
        """End the stream. Return the remaining frames."""
        return self.feed(0, 0)


def nv12_of(frame: Any) -> Tensor:
    """Return a (3/2 H, W) view of the device memory of a frame."""
    return torch.utils.dlpack.from_dlpack(frame)


class SessionPool:
    """Open sessions of the lanes of one device.

    Args:
        open_session: Function of (key, stream handle) that opens a session.
        most: Maximum number of open sessions per lane. The least recently used session is closed.
    """

    def __init__(self, open_session: Callable[[SessionKey, int], Session], most: int = SESSIONS_PER_LANE) -> None:
        self._open, self._most = open_session, most
        self._sessions: dict[int | str, OrderedDict[SessionKey, Session]] = {}

    def __len__(self) -> int:
        return sum(map(len, list(self._sessions.values())))

    def take(self, key: SessionKey, lane: Lane) -> Session:
        """Take or open the session of a lane for ``key``. No lock: only the caller uses the lane until ``put``.

        Args:
            key: Codec and size.
            lane: Lane of the calls. Lanes of later loaders on the same stream share its sessions.
        """
        sessions = self._sessions.setdefault(_owner(lane), OrderedDict())
        session = sessions.pop(key, None)
        while len(sessions) >= self._most:
            sessions.popitem(last=False)  # the session closes with its last reference
        return session or self._open(key, lane.number)

    def put(self, key: SessionKey, lane: Lane, session: Session) -> None:
        """Keep a session open for the next clip of the lane. Do not put back a session that raised an error."""
        self._sessions[_owner(lane)][key] = session


def _owner(lane: Lane) -> int | str:
    return lane.name if lane.in_line else lane.number
