"""NAL units, the parts of packets of H.264 and HEVC: conversion of their format, and their types.

MP4 and Matroska store the length of each unit before the unit. The alternative is a start code before each unit (Annex B of the
standards). The video engines of a card support start codes only, and libavcodec supports both, so clips are packed with start
codes.
"""

from collections.abc import Iterator

_START_CODE = b"\0\0\0\1"

_H264, _HEVC = "h264", "hevc"


class DamagedPacketError(Exception):
    """A packet does not consist of complete NAL units."""


def parameter_sets(codec: str, extradata: bytes) -> tuple[bytes, int]:
    """Return the parameter sets with start codes, and the number of bytes of each length in packets.

    The number is 0 if packets have start codes.

    Args:
        codec: FFmpeg's name of the codec. For codecs other than H.264 and HEVC, ``extradata`` is returned unchanged.
        extradata: ``avcC`` or ``hvcC`` of ISO/IEC 14496-15, or parameter sets with start codes.

    Raises:
        DamagedPacketError: If ``extradata`` ends too early.
    """
    if codec not in (_H264, _HEVC) or not extradata or extradata[0] != 1:
        return extradata, 0
    try:
        return _avcc(extradata) if codec == _H264 else _hvcc(extradata)
    except IndexError:
        raise DamagedPacketError("its parameter sets are cut off") from None


def _avcc(data: bytes) -> tuple[bytes, int]:
    """Return ``parameter_sets`` of an ``avcC`` (H.264)."""
    length_size = (data[4] & 3) + 1
    sets = bytearray()
    offset = 5
    for mask in (31, 255):  # sequence parameter sets, picture parameter sets
        count, offset = data[offset] & mask, offset + 1
        for _ in range(count):
            offset = _append_set(sets, data, offset)
    return bytes(sets), length_size


def _hvcc(data: bytes) -> tuple[bytes, int]:
    """Return ``parameter_sets`` of an ``hvcC`` (HEVC)."""
    length_size = (data[21] & 3) + 1
    sets = bytearray()
    offset = 23
    for _ in range(data[22]):
        count, offset = int.from_bytes(data[offset + 1 : offset + 3], "big"), offset + 3
        for _ in range(count):
            offset = _append_set(sets, data, offset)
    return bytes(sets), length_size


def _append_set(sets: bytearray, data: bytes, offset: int) -> int:
    """Append the parameter set at ``offset`` with a start code. Return the offset after the set."""
    size = data[offset] << 8 | data[offset + 1]
    if offset + 2 + size > len(data):
        raise IndexError
    sets += _START_CODE + data[offset + 2 : offset + 2 + size]
    return offset + 2 + size


def with_start_codes(packet: memoryview, length_size: int) -> bytes | memoryview:
    """Return a packet with start codes in place of lengths.

    Args:
        packet: (bytes,) packet.
        length_size: Number of bytes of each length; 0 for a packet that has start codes.

    Raises:
        DamagedPacketError: If a NAL unit is longer than the packet.
    """
    if not length_size:
        return packet
    result = bytearray()
    size = len(packet)
    offset = 0
    while offset + length_size <= size:
        length = int.from_bytes(packet[offset : offset + length_size], "big")
        offset += length_size
        if offset + length > size:
            raise DamagedPacketError("a packet is damaged")
        result += _START_CODE
        result += packet[offset : offset + length]
        offset += length
    if offset != size:
        raise DamagedPacketError("a packet is damaged")
    return bytes(result)


def is_instant(codec: str, packet: bytes | memoryview) -> bool:
    """Return whether decoding can start at a key frame: no later frame, in decoding order, is predicted from earlier frames.

    Args:
        codec: FFmpeg's name of the codec.
        packet: (bytes,) key frame, with start codes.
    """
    if codec not in (_H264, _HEVC):
        return True
    data = bytes(packet)
    if codec == _H264:
        return any(data[offset] & 0x1F == 5 for offset in _units(data))
    return any(data[offset] >> 1 & 0x3F in (19, 20) for offset in _units(data))


def is_random_access(codec: str, packet: bytes | memoryview) -> bool:
    """Return whether decoding from a frame on gives correct pictures of the frames that are displayed after it.

    Args:
        codec: FFmpeg's name of the codec: h264 or hevc.
        packet: (bytes,) frame, with start codes.
    """
    data = bytes(packet)
    if codec == _HEVC:
        return any(16 <= data[offset] >> 1 & 0x3F <= 23 for offset in _units(data))
    if is_instant(codec, packet):
        return True
    # SEI whose first message is a recovery point. Its number of frames until pictures are correct begins with bit 1 if it is 0.
    # Other numbers (gradual refresh) are not used: x264 states too small ones.
    return any(
        data[offset] & 0x1F == 6 and data[offset + 1 : offset + 2] == b"\x06" and data[offset + 3 : offset + 4] >= b"\x80"
        for offset in _units(data)
    )


def is_skipped_leading(packet: bytes | memoryview) -> bool:
    """Return whether decoders that start at the key frame before a frame of HEVC do not show the frame (RASL).

    Args:
        packet: (bytes,) frame, with start codes.
    """
    data = bytes(packet)
    return any(data[offset] >> 1 & 0x3F in (8, 9) for offset in _units(data))


def _units(data: bytes) -> Iterator[int]:
    """Yield the offset of the header of each NAL unit."""
    offset = data.find(b"\0\0\1")
    while 0 <= offset < len(data) - 3:
        yield offset + 3
        offset = data.find(b"\0\0\1", offset + 3)


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
    data = bytes(packet)
    slices = [data[offset] for offset in _units(data) if data[offset] & 0x1F in (1, 2, 3, 4, 5)]
    return not slices or any(header & 0x60 for header in slices)
