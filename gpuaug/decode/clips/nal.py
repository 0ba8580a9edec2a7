"""NAL units of H.264 and HEVC: from the form of MP4 and Matroska, where a length precedes each, to start codes (Annex B).

Decoders of cards read start codes alone, and libavcodec reads both, so clips are packed with start codes.
"""

from collections.abc import Iterator

_CODE = b"\0\0\0\1"

_H264, _HEVC = "h264", "hevc"


class DamagedPacketError(Exception):
    """A packet whose NAL units do not fill it."""


def parameter_sets(codec: str, extradata: bytes) -> tuple[bytes, int]:
    """Parameter sets with start codes, and the bytes of the length before a NAL unit; 0 for packets with start codes already.

    Args:
        codec: FFmpeg's name of the codec. Of other codecs than H.264 and HEVC, ``extradata`` is returned as it is.
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
    length_size = (data[4] & 3) + 1
    sets = bytearray()
    at = 5
    for mask in (31, 255):  # sequence parameter sets, picture parameter sets
        count, at = data[at] & mask, at + 1
        for _ in range(count):
            at = _add(sets, data, at)
    return bytes(sets), length_size


def _hvcc(data: bytes) -> tuple[bytes, int]:
    length_size = (data[21] & 3) + 1
    sets = bytearray()
    at = 23
    for _ in range(data[22]):
        count, at = int.from_bytes(data[at + 1 : at + 3], "big"), at + 3
        for _ in range(count):
            at = _add(sets, data, at)
    return bytes(sets), length_size


def _add(sets: bytearray, data: bytes, at: int) -> int:
    size = data[at] << 8 | data[at + 1]
    if at + 2 + size > len(data):
        raise IndexError
    sets += _CODE + data[at + 2 : at + 2 + size]
    return at + 2 + size


def with_start_codes(packet: memoryview, length_size: int) -> bytes | memoryview:
    """A packet with start codes in place of lengths.

    Args:
        packet: (bytes,) one packet.
        length_size: Bytes of each length; 0 for a packet that has start codes.

    Raises:
        DamagedPacketError: If a NAL unit is longer than the packet.
    """
    if not length_size:
        return packet
    found = bytearray()
    size = len(packet)
    at = 0
    while at + length_size <= size:
        length = int.from_bytes(packet[at : at + length_size], "big")
        at += length_size
        if at + length > size:
            raise DamagedPacketError("a packet of it is damaged")
        found += _CODE
        found += packet[at : at + length]
        at += length
    if at != size:
        raise DamagedPacketError("a packet of it is damaged")
    return bytes(found)


def recovery(codec: str, packet: bytes | memoryview) -> int:
    """Number of frames after which decoding that begins with a key frame gives the right pictures.

    It is 0 but for H.264 that refreshes pictures little by little, with a recovery point in place of key frames.

    Args:
        codec: FFmpeg's name of the codec.
        packet: (bytes,) a key frame, with start codes.
    """
    if codec != _H264:
        return 0
    data = bytes(packet)
    for at in _units(data):
        if data[at] & 0x1F == 6 and data[at + 1 : at + 2] == b"\x06":  # SEI whose first message is a recovery point
            bits = int.from_bytes(data[at + 3 : at + 11].ljust(8, b"\0"), "big")
            zeros = 64 - bits.bit_length()  # Exp-Golomb
            return (bits >> (63 - 2 * zeros)) - 1 if zeros < 32 else 0
    return 0


def is_instant(codec: str, packet: bytes | memoryview) -> bool:
    """Whether no frame after a key frame may refer to frames before it, in the order of decoding.

    Args:
        codec: FFmpeg's name of the codec.
        packet: (bytes,) a key frame, with start codes.
    """
    if codec not in (_H264, _HEVC):
        return True
    data = bytes(packet)
    if codec == _H264:
        return any(data[at] & 0x1F == 5 for at in _units(data))
    return any(data[at] >> 1 & 0x3F in (19, 20) for at in _units(data))


def _units(data: bytes) -> Iterator[int]:
    """Position of the header of each NAL unit."""
    at = data.find(b"\0\0\1")
    while 0 <= at < len(data) - 3:
        yield at + 3
        at = data.find(b"\0\0\1", at + 3)


def is_reference(codec: str, packet: bytes | memoryview) -> bool:
    """Whether other frames may need this one. ``False`` only for an H.264 frame, with start codes, whose slices all say so.

    A clip needs no frames that are neither shown nor referred to: of every fourth frame of a video with B-frames, a third of
    the packets.
    """
    if codec != _H264:
        return True
    data = bytes(packet)
    slices = [data[at] for at in _units(data) if data[at] & 0x1F in (1, 2, 3, 4, 5)]
    return not slices or any(header & 0x60 for header in slices)
