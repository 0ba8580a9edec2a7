"""Headers of frames: whether packets of several codecs hold what their container says. See ``nal`` for H.264 and HEVC."""

from gpuaug.decode.clips import nal

_EMPTY_MPEG4 = 19
"""Maximum size in bytes of a packet of MPEG-4 that holds no frame (FFmpeg's ``MAX_NVOP_SIZE``)."""

_PICTURE = b"\0\0\1\0"
"""Start code of a frame of MPEG-1 and MPEG-2."""

_VOP = b"\0\0\1\xb6"
"""Start code of a frame of MPEG-4."""


def is_key_frame(codec: str, packet: bytes | memoryview) -> bool:
    """Return whether a packet that its container marks as a key frame is one.

    An MP4 file without a table of key frames marks all packets.

    Args:
        codec: FFmpeg's name of the codec. For codecs that are not listed here, the container is trusted.
        packet: (bytes,) packet, with start codes.
    """
    first = packet[0]
    match codec:
        case "h264" | "hevc":
            return nal.is_random_access(codec, packet)
        case "mpeg1video" | "mpeg2video":
            header = _after(packet, _PICTURE)
            return len(header) > 1 and header[1] >> 3 & 7 == 1
        case "mpeg4":
            header = _after(packet, _VOP)
            return len(header) > 0 and header[0] >> 6 == 0
        case "vp8":
            return not first & 1
        case "vp9":
            return not first & (0b0110 if first >> 4 & 3 == 3 else 0b1100)  # profile 3 has one bit more before the frame type
        case "av1":
            sequence_header, temporal_delimiter = 1, b"\x12\0"
            unit = packet[2] if bytes(packet[:2]) == temporal_delimiter and len(packet) > 2 else first
            return unit >> 3 & 15 == sequence_header
        case "ffv1":
            return int.from_bytes(packet[:2], "big") >= 0x7F80  # the first value of the range coder is 1
    return True


def holds_one_frame(codec: str, packet: memoryview, *, allow_b_frames: bool) -> bool:
    """Return whether a packet holds exactly one frame, which is displayed. ``True`` for codecs other than VP8 and MPEG-4.

    Args:
        codec: FFmpeg's name of the codec.
        packet: (bytes,) packet.
        allow_b_frames: Whether a packet of MPEG-4 may hold a B-frame.
    """
    if codec == "vp8":
        return bool(packet[0] >> 4 & 1)  # bit of the frame header: the frame is displayed
    if codec == "mpeg4":
        is_b_frame = bytes(packet[:4]) == _VOP and packet[4] >> 6 == 2
        return len(packet) > _EMPTY_MPEG4 and (allow_b_frames or not is_b_frame)
    return True


def _after(packet: bytes | memoryview, start_code: bytes) -> bytes:
    """Return at most two bytes after the first start code; no bytes if there is none."""
    data = bytes(packet)
    offset = data.find(start_code)
    return data[offset + 4 : offset + 6] if offset >= 0 else b""
