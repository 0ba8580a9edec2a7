"""Sessions of NVDEC through PyNvVideoCodec: opened for a codec and a size, kept open, closed when others are used more.

This is the only file that speaks to PyNvVideoCodec.

A session belongs to no file: after a clip it is told that the stream has ended, and takes the next clip of any file with its
codec and size. It gives one frame for each packet, in the order in which they are shown.

The library's ``SimpleDecoder``, which opens files, is not used: it would read the file again, its frames have no time stamp
that could be checked, and its conversion to RGB keeps the matrix of colours in one place for all threads. A call for each
packet made threads wait for the interpreter's lock (H100, 340x256: 8 threads 37 clips a second, one 45), so calls take many.
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
"""Sessions that a lane keeps open: codecs and sizes of videos that its clips alternate between."""

CODECS = {"h264": "H264", "hevc": "HEVC", "vp9": "VP9", "av1": "AV1"}
"""PyNvVideoCodec's names of codecs, by FFmpeg's."""


class SessionKey(NamedTuple):
    """What a session is opened for."""

    codec: str
    height: int
    width: int


class Caps(NamedTuple):
    """Limits of the engines for one codec at 8 bits and 4:2:0."""

    least: tuple[int, int]
    """Least height and width."""
    most: tuple[int, int]
    """Most height and width."""
    most_blocks: int
    """Most blocks of 16x16 pixels."""


@cache
def library() -> Any:
    """The module ``PyNvVideoCodec``, or ``None`` where it is not installed.

    Raises:
        Exception: Of any type, if the driver does not let it load.
    """
    logger = logging.getLogger("PyNvVideoCodec")
    if importlib.util.find_spec("PyNvVideoCodec") is None:
        return None
    module = importlib.import_module("PyNvVideoCodec")
    logger.setLevel(logging.ERROR)
    return module


def caps(gpu: int, codec: str) -> Caps | None:
    """Limits of a card's engines for a codec, or ``None`` if they do not decode it."""
    nvc = library()
    chroma = getattr(nvc.cudaVideoChromaFormat, "420")
    try:
        found = nvc.GetDecoderCaps(gpuid=gpu, codec=getattr(nvc.cudaVideoCodec, CODECS[codec]), chromaformat=chroma, bitdepth=8)
    except Exception:  # it raises for codecs that the driver does not know
        return None
    if not found["supported"] or not found["num_decoder_engines"]:
        return None
    return Caps((found["height_min"], found["width_min"]), (found["height_max"], found["width_max"]), found["mb_num_max"])


class Session:
    """A session of NVDEC, used by one thread at a time.

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
        """Feed packets. Returns the frames that are ready, as they are shown; the next call uses their memory again.

        Args:
            address: Address of the first packet on the host.
            size: Bytes up to the end of the last packet.
        """
        packet = self._packet()
        packet.bsl_data, packet.bsl = address, size
        frames: list[Any] = self._decoder.Decode(packet)
        return frames

    def end(self) -> list[Any]:
        """Tell that the stream has ended. Returns the remaining frames."""
        return self.feed(0, 0)


def nv12_of(frame: Any) -> Tensor:
    """(3/2 H, W) the frame's memory on the device."""
    return torch.utils.dlpack.from_dlpack(frame)


class SessionPool:
    """The open sessions of the lanes of one device.

    Args:
        open_session: Opens a session for a key, on a stream.
        most: Sessions that stay open for a lane. The least recently used one is closed.
    """

    def __init__(self, open_session: Callable[[SessionKey, int], Session], most: int = SESSIONS_PER_LANE) -> None:
        self._open, self._most = open_session, most
        self._sessions: dict[int | str, OrderedDict[SessionKey, Session]] = {}

    def __len__(self) -> int:
        return sum(map(len, list(self._sessions.values())))

    def take(self, key: SessionKey, lane: Lane) -> Session:
        """The session of a lane for ``key``. The lane is the caller's alone until ``put``, so that no lock is needed.

        Args:
            key: Codec and size.
            lane: The lane. A later loader's lane on the same stream has the same sessions.
        """
        mine = self._sessions.setdefault(_owner(lane), OrderedDict())
        session = mine.pop(key, None)
        while len(mine) >= self._most:
            mine.popitem(last=False)  # closed with its last reference
        return session or self._open(key, lane.number)

    def put(self, key: SessionKey, lane: Lane, session: Session) -> None:
        """Keep a session open for the lane's next clip. A session that raised an error is not put back."""
        self._sessions[_owner(lane)][key] = session


def _owner(lane: Lane) -> int | str:
    return lane.name if lane.in_line else lane.number
