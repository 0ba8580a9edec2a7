"""NAL units, the parts of packets of H.264 and HEVC: conversion of their format, key frames, and frames that others refer to.

A *packet* is a unit of coded data, usually of one frame. MP4 and Matroska store the length of each NAL unit before the unit.
The alternative is a start code before each unit (Annex B of the standards). The video engines of a GPU support start codes
only, and libavcodec supports both, so clips are packed with start codes.
"""

from collections.abc import Iterator

from gpuaug.decode.clips.limits import VideoError

_START_CODE = b"\0\0\0\1"

_H264, _HEVC = "h264", "hevc"


def parameter_sets(codec: str, extradata: bytes) -> tuple[bytes, int]:
    """Return the parameter sets with start codes, and the number of bytes of each length in packets.

    The number is 0 if packets have start codes.

    Args:
        codec: FFmpeg's name of the codec. For codecs other than H.264 and HEVC, ``extradata`` is returned unchanged.
        extradata: ``avcC`` or ``hvcC`` of ISO/IEC 14496-15, or parameter sets with start codes.

    Raises:
        VideoError: If ``extradata`` ends too early.
    """
    if codec not in (_H264, _HEVC) or not extradata or extradata[0] != 1:
        return extradata, 0
    is_h264 = codec == _H264
    sets = bytearray()
    try:
        length_size = (extradata[4 if is_h264 else 21] & 3) + 1
        offset = 5 if is_h264 else 23
        for number in range(2 if is_h264 else extradata[22]):  # H.264: sequence parameter sets, picture parameter sets
            if is_h264:
                # The number of sequence parameter sets has 5 bits, and the number of picture parameter sets 8 bits.
                count, offset = extradata[offset] & (31, 255)[number], offset + 1
            else:
                count, offset = int.from_bytes(extradata[offset + 1 : offset + 3], "big"), offset + 3
            for _ in range(count):
                size = extradata[offset] << 8 | extradata[offset + 1]
                offset += 2 + size
                if offset > len(extradata):
                    raise IndexError
                sets += _START_CODE + extradata[offset - size : offset]
    except IndexError:
        raise VideoError("its parameter sets are cut off") from None
    return bytes(sets), length_size


def with_start_codes(packet: memoryview, length_size: int) -> bytes | memoryview:
    """Return a packet with start codes in place of lengths.

    Args:
        packet: (bytes,) packet.
        length_size: Number of bytes of each length; 0 for a packet that has start codes.

    Raises:
        VideoError: If a NAL unit is longer than the packet.
    """
    if not length_size:
        return packet
    result = bytearray()
    size = len(packet)
    offset = 0
    while offset + length_size <= size:
        start = offset + length_size
        offset = start + int.from_bytes(packet[offset:start], "big")
        result += _START_CODE
        result += packet[start:offset]
    if offset != size:
        raise VideoError("a packet is damaged")
    return bytes(result)


def is_key_frame(codec: str, packet: bytes | memoryview) -> bool:
    """Return whether decoding from a frame on gives correct pictures of the frames that are displayed after it.

    An MP4 file without a table of key frames marks all packets as key frames. FFmpeg corrects the marks of VP9 and AV1.

    Args:
        codec: FFmpeg's name of the codec. ``True`` for codecs other than H.264 and HEVC.
        packet: (bytes,) packet that its container marks as a key frame, with start codes.
    """
    units = _units(codec, packet)
    if codec == _HEVC:  # types of IRAP frames
        return any(16 <= unit_type <= 23 for unit_type, _ in units)
    # H.264: a unit of an IDR frame (5), or an SEI unit (6) whose first message is a recovery point. The number of frames until
    # pictures are correct is then 0, which is coded as one bit 1. Other numbers (gradual refresh) are not used: x264 states too
    # small ones.
    return codec != _H264 or any(
        unit_type == 5 or (unit_type == 6 and unit[1:2] == b"\x06" and unit[3:4] >= b"\x80") for unit_type, unit in units
    )


def is_idr(codec: str, packet: bytes | memoryview) -> bool:
    """Return whether a key frame is an IDR frame: no later frame, in decoding order, is predicted from earlier frames.

    Args:
        codec: FFmpeg's name of the codec. ``True`` for codecs other than H.264 and HEVC.
        packet: (bytes,) key frame, with start codes.
    """
    idr_types = {_H264: (5,), _HEVC: (19, 20)}.get(codec)
    return idr_types is None or any(unit_type in idr_types for unit_type, _ in _units(codec, packet))


def is_reference(codec: str, packet: bytes | memoryview) -> bool:
    """Return whether other frames may be predicted from a frame.

    ``False`` only for H.264, for a frame whose slices are all marked as not used for prediction. A clip needs neither to store
    nor to decode such frames unless they are selected: a clip with every fourth frame of a video with B-frames needs a third of
    the packets.

    Args:
        codec: FFmpeg's name of the codec.
        packet: (bytes,) frame, with start codes.
    """
    if codec != _H264:
        return True
    slices = [unit[0] for unit_type, unit in _units(codec, packet) if 1 <= unit_type <= 5]
    return not slices or any(header & 0x60 for header in slices)  # ``nal_ref_idc``: 0 if not used for prediction


def _units(codec: str, packet: bytes | memoryview) -> Iterator[tuple[int, bytes]]:
    """Yield (type, first four bytes) of each NAL unit of a packet of H.264 or HEVC."""
    data = bytes(packet)
    offset = data.find(b"\0\0\1") + 3
    while 3 <= offset < len(data):
        yield data[offset] & 0x1F if codec == _H264 else data[offset] >> 1 & 0x3F, data[offset : offset + 4]
        offset = data.find(b"\0\0\1", offset) + 3
