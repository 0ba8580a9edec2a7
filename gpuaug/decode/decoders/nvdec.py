"""Decoding of clips by NVDEC, the video engines (decoding hardware) of a GPU (*card*), through the package PyNvVideoCodec.

A *session* is an open decoder for one codec and size. Sessions are kept open in a least-recently-used cache, because a session
is independent of files: after the packets (encoded frames) of one clip, it decodes the next clip of any file with the same
codec and size. It returns one frame per packet, in display order. A *lane* is a CUDA stream.

PyNvVideoCodec's ``SimpleDecoder`` is not used: it would read the file again, its frames have no time stamps to check, and its
conversion to RGB has one colour matrix for all threads. A call takes many packets, because with one call per packet threads
waited for the interpreter's lock: 8 threads decoded 37 clips of 340x256 per second, and one thread 45 (H100).
"""

import importlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.streams import Event, Lane
from gpuaug.decode import nvjpeg
from gpuaug.decode.clips.layout import ClipInfo, ClipLayout
from gpuaug.decode.decoders.base import MAX_SESSIONS, FileDecoder, Resources, share
from gpuaug.decode.layout import Work

PACKETS_PER_CALL = 32
"""Maximum number of packets per call. A session allocates memory for this number of frames and a few more.

8 sessions decoded 232 clips of 340x256 per second with 4 packets per call, 285 with 12, 319 with 32, and 296 with 200 (H100,
2026-11-26).
"""

_START_CODES = ("h264", "hevc")
"""Codecs whose packets begin with start codes, so that one call can take several. Other codecs need one call per packet."""

_PIXEL_FORMATS = ("yuv420p", "yuvj420p")
"""Pixel formats that the engines decode, by FFmpeg's names: 4:2:0 of 8 bits."""

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


class SessionPool:
    """Cache of open sessions, per lane (CUDA stream) of one device.

    Args:
        open_session: Function of (key, stream handle) that opens a session.
        max_sessions: Maximum number of open sessions per lane, beyond which the least recently used session is closed.
    """

    def __init__(self, open_session: Callable[[SessionKey, int], Session], max_sessions: int = SESSIONS_PER_LANE) -> None:
        self._open_session, self._max_sessions = open_session, max_sessions
        self._sessions: dict[int | str, OrderedDict[SessionKey, Session]] = {}
        """Handle of a lane's CUDA stream, or name of the lane → sessions that are open and not in use, the last used last."""

    def __len__(self) -> int:
        return sum(map(len, list(self._sessions.values())))

    def take(self, key: SessionKey, lane: Lane) -> Session:
        """Take the session of a lane for ``key`` out of the pool, or open one. Needs no lock: one thread at a time uses a lane.

        Args:
            key: Codec and size.
            lane: Lane on which frames are written. Lanes of later loaders on the same CUDA stream take over its sessions.
        """
        sessions = self._sessions.setdefault(lane.handle or lane.name, OrderedDict())
        session = sessions.pop(key, None)
        while len(sessions) >= self._max_sessions:  # leaves room to put the taken session back
            sessions.popitem(last=False)  # deleting a session closes it
        return session or self._open_session(key, lane.handle)

    def put(self, key: SessionKey, lane: Lane, session: Session) -> None:
        """Put a session back into the pool, for the next clip of the lane. Do not put back a session that raised an error."""
        self._sessions[lane.handle or lane.name][key] = session


class NvDec(FileDecoder):
    """Decode clips with the video engines of one device.

    The engines write frames in the format NV12 (a plane of luma, then chroma of half the size). ``ClipLayout.finish`` converts
    the frames to RGB when all clips of the batch are decoded.

    Args:
        device: A CUDA device.
    """

    name, on_card = "nvdec", True
    max_calls = MAX_SESSIONS

    def __init__(self, device: torch.device) -> None:
        gpu = int(device.index or 0)
        caps_of = {codec: caps(gpu, codec) for codec in CODECS}
        self.caps = {codec: caps for codec, caps in caps_of.items() if caps}
        """Codec that the engines decode, by FFmpeg's name → limits of the engines, by PyNvVideoCodec's names."""
        self.files = f"clips of {', '.join(sorted(self.caps))}: 4:2:0 of 8 bits, progressive, with even sides"
        self.sessions = SessionPool(lambda key, stream: Session(key, gpu, stream))
        """Sessions that are kept open, for all loaders of the device."""

    @property
    def version(self) -> str:
        """Version of PyNvVideoCodec."""
        return f"PyNvVideoCodec {library().__version__}"

    def takes(self, table: NDArray[np.void]) -> NDArray[np.bool_]:
        """Return the (B,) mask of clips whose codec, size and pixel format the engines support. ``table``: (B,) ``CLIP``."""
        height, width = table["height"], table["width"]
        format_fits: NDArray[np.bool_] = table["fits_nvdec"] & np.isin(table["pixel_format"], _PIXEL_FORMATS)
        format_fits &= ~table["interlaced"] & (height % 2 == 0) & (width % 2 == 0)
        blocks = -(-height // 16) * -(-width // 16)  # number of macroblocks of 16x16 pixels, which the engines limit
        codec_fits = np.zeros(len(table), np.bool_)
        for codec, caps in self.caps.items():
            size_fits = (height >= caps["height_min"]) & (width >= caps["width_min"]) & (blocks <= caps["mb_num_max"])
            size_fits &= (height <= caps["height_max"]) & (width <= caps["width_max"])
            codec_fits |= (table["codec"] == codec) & size_fits
        return format_fits & codec_fits

    def begin(self, work: Work[ClipLayout], indices: NDArray[Any], resources: Resources) -> Callable[[], Event]:
        """Start to decode the clips on the threads that feed the engines, in descending order of packets · pixels."""
        pending = work.layout.slowest_first(indices)
        events: list[Event] = []
        decode = partial(self._decode_pending, work, resources, events)
        wait_for_calls = share(resources.pools.clips.submit, min(len(indices), MAX_SESSIONS), decode, pending)

        def finish() -> Event:
            wait_for_calls()
            for event in events:
                resources.lane.wait(event)
            return resources.lane.record_event()

        return finish

    def _decode_pending(
        self, work: Work[ClipLayout], resources: Resources, events: list[Event], pending: Iterator[tuple[int, ClipInfo]]
    ) -> None:
        """Decode clips on one lane until ``pending`` is exhausted. Runs on several threads for one batch.

        Args:
            work: Decoding task of the batch.
            resources: Lanes and threads.
            events: List to which this call adds the event after the last write of a frame.
            pending: Clips that no thread has started, shared by all threads: index, and header fields.
        """
        if not resources.lanes.in_line:
            nvjpeg.enter(resources.lanes.device)  # prepares this thread for CUDA calls of any library
        lane = resources.card_lanes.get()
        try:
            with resources.lanes.launching(resources.lanes.consumer()):
                lane.make_current()
                for index, info in pending:
                    if work.is_abandoned:
                        break
                    if problem := self._decode_clip(work, index, info, lane):
                        work.problems[index] = problem
                events.append(lane.record_event())
        finally:
            resources.card_lanes.put(lane)

    def _decode_clip(self, work: Work[ClipLayout], index: int, info: ClipInfo, lane: Lane) -> str:
        """Decode one clip. Return the reason why it cannot be decoded, or an empty string."""
        assert work.raw is not None  # allocated if the card decodes at least one clip of the batch
        key = SessionKey(info.stream.codec, info.stream.height, info.stream.width)
        try:
            session = self.sessions.take(key, lane)
            problem = _decode(session, work.encoded.data.data_ptr(), info, work.layout.raw_clip(work.raw, index))
        except Exception as error:  # the session is not put back into the pool, so the next clip opens a new one
            return f"NVDEC says: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
        if not problem:
            self.sessions.put(key, lane, session)
        return problem


def _decode(session: Session, address: int, info: ClipInfo, frames_out: Tensor) -> str:
    """Decode one clip on the current stream.

    Args:
        session: Session for the codec and size of the clip.
        address: Host address of the packets of the batch.
        info: Header fields of the clip.
        frames_out: (T, 3/2 H, W) output for the selected frames of the clip, in the format NV12.

    Returns:
        Reason why the clip cannot be decoded, or an empty string.
    """
    time_stamps = sorted(time_stamp for _, _, time_stamp, _ in info.packets)
    # NVDEC returns frames without time stamps, but in display order: frame ``count`` has time stamp ``time_stamps[count]``.
    count = 0
    for start, size in _packet_ranges(info):
        for frame in session.feed(address + start if size else 0, size):  # size 0 ends the clip
            if count == len(time_stamps):
                return f"NVDEC returns more than {count} frames, which is its number of packets"
            positions = info.positions.get(time_stamps[count], ())  # indices into ``frames_out``; empty if not selected
            count += 1
            if positions:
                pixels = torch.utils.dlpack.from_dlpack(frame)  # (3/2 H, W) view of device memory: luma (H, W), then chroma
                if pixels.shape != frames_out.shape[1:]:
                    expected = tuple(frames_out.shape[1:])
                    return f"NVDEC returns frames of shape {tuple(pixels.shape)}, but its header says {expected}"
                for position in positions:
                    frames_out[position].copy_(pixels, non_blocking=True)
    return "" if count == len(time_stamps) else f"NVDEC returns {count} frames from its {len(time_stamps)} packets"


def _packet_ranges(info: ClipInfo) -> Iterator[tuple[int, int]]:
    """Yield (offset, number of bytes) of the packets of each call. The last call has no bytes: it ends the stream.

    For codecs with start codes, a call takes several packets and the padding between them. The first call begins with the
    parameter sets of the codec, which precede the packets. For other codecs, a call takes one packet.
    """
    packets_per_call = PACKETS_PER_CALL if info.stream.codec in _START_CODES else 1
    for first in range(0, len(info.packets), packets_per_call):
        start, _, _, _ = info.packets[first]
        end_start, end_size, _, _ = info.packets[min(first + packets_per_call, len(info.packets)) - 1]
        if first == 0 and info.stream.codec in _START_CODES:
            start = info.start  # offset of the parameter sets
        yield start, end_start + end_size - start
    yield 0, 0
