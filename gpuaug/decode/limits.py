"""Limits on what an image file may declare, and the count of its metadata against them.

These limits are not options. ``DecodeStage`` has arguments for the limits on pixels, ``max_pixels`` and ``max_bytes``. The
parsers check the limits of this module in the worker that reads the file, before a library reads it.
"""

MAX_FILE_BYTES = 2**30
"""Maximum size of a file in bytes: larger than any image, and too small to exhaust the memory of a worker."""

MAX_SCANS = 100
"""Maximum number of scans of a JPEG. Encoders write up to twenty. A decoder visits all blocks of an image in each scan."""

MAX_EXIF_SEGMENTS = 100
"""Maximum number of segments of EXIF of a JPEG. PIL joins them in quadratic time."""

MAX_METADATA_BYTES = 2**25
"""Maximum number of bytes of metadata in a file: all of its content but the encoded pixels."""

MAX_SEGMENTS = 4096
"""Maximum number of pieces of metadata in a file: segments, chunks, blocks, boxes, tags or comments.

Photographs have about ten, plus one per 64 KB of metadata of a JPEG.
"""

MAX_CHUNKS = 2**18
"""Maximum number of chunks of encoded pixels of a PNG or WebP, and of blocks of application data of a GIF.

libpng divides 2 GiB of pixels into this number of chunks, of 8 KB each.
"""

MAX_TILES = 2**20
"""Maximum number of strips or tiles of a TIFF page whose size requires them: 268 megapixels in tiles of 16x16 pixels."""

MAX_TILE_BYTES = 2**28
"""Maximum number of bytes of a decoded tile, if it is larger than its image."""

MIN_TILE_PIXELS = 4096
"""Minimum average number of pixels of a tile of a JPEG 2000 with more than ``MAX_SEGMENTS`` tiles. A tile takes up to 10 KB."""

MAX_PYTHON_BYTES = 2**24
"""Maximum size in bytes of a file that PIL decodes by a loop in Python, in about a microsecond per byte."""

MAX_TEXT_BYTES = 2**20
"""Maximum size in bytes of a decompressed text of a PNG, as in PIL."""


class LimitError(Exception):
    """A file exceeds a limit, contradicts itself, or is not a regular file. The message is a clause, for ``Header.problem``."""


class MetadataLimits:
    """Counter of the metadata and chunks of one file, which raises an error where the file exceeds a limit."""

    __slots__ = ("_bytes", "_chunks", "_segments")

    def __init__(self) -> None:
        self._bytes = self._segments = self._chunks = 0

    def add(self, size: int) -> None:
        """Count one piece of metadata of ``size`` bytes.

        Raises:
            LimitError: If the file has more metadata than a limit allows.
        """
        self._segments += 1
        self._bytes += size
        if self._segments > MAX_SEGMENTS:
            raise LimitError(f"its metadata have more than {MAX_SEGMENTS} segments, which is the limit")
        if self._bytes > MAX_METADATA_BYTES:
            raise LimitError(f"its metadata have more than {MAX_METADATA_BYTES} bytes, which is the limit")

    def add_chunk(self) -> None:
        """Count one chunk of encoded pixels, or one block of application data.

        Raises:
            LimitError: If the file has more chunks than the limit allows.
        """
        self._chunks += 1
        if self._chunks > MAX_CHUNKS:
            raise LimitError(f"it has more than {MAX_CHUNKS} chunks, which is the limit")
