"""Limits of videos, and the error for a video that cannot be read. ``docs/clips_from_files.md`` states the limits."""

MAX_PACKETS = 2**24
"""Maximum number of packets of a video, and of all tracks that an MP4 file declares: six days with 30 frames per second.

A packet is a unit of coded data, usually one frame.
"""

MAX_TRACKS = 64
"""Maximum number of tracks of a video: of pictures, sound and text."""

MAX_FRAME_PIXELS = 2**26
"""Maximum number of pixels of a frame, before the stage applies its ``max_pixels``. The largest levels of H.264, HEVC and AV1
have 2**25.1."""

MAX_HEADER_BYTES = 2**28
"""Maximum number of bytes of the headers of an MP4 file: some 16 bytes per packet."""

MAX_READINGS = 16
"""Maximum number of times that the bytes of a file are read as packets. Edits of an MP4 file may repeat frames."""

MAX_CLIP_BYTES = 2**30
"""Maximum size of the packets of a clip in bytes."""

CONVERT = "convert it to H.264 in an MP4 file"
"""Way out for a video that cannot be read frame by frame."""


class VideoError(Exception):
    """A video cannot be read. The message is a clause about "it", for ``ClipHeaders.problems``."""
