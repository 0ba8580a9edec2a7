"""Small videos without a download: moving textures, with one class per direction, encoded once and cached."""

import os
from pathlib import Path

import numpy as np

from gpuaug.benchkit.photos import cached_folder

VERSION = 1
"""Version of the files. Increase the version when the files change, so that an older cache is not used."""

WINDOW_SHIFTS = {"falling": (-2, 0), "rising": (2, 0), "sideways": (0, 2), "still": (0, 0)}
"""Displacement (down, right) of the visible window over the texture, in pixels per frame, per class.

The texture appears to move in the opposite direction. A horizontal flip of a video does not change its class.
"""


def moving_textures() -> Path:
    """Return the folder of class folders with the videos. The first call writes the folder (see ``cached_folder``)."""
    return cached_folder(f"videos-{VERSION}", write)


def write(root: str | os.PathLike[str], *, per_class: int = 16, frames: int = 60, height: int = 96, width: int = 128) -> None:
    """Write videos of all classes, in one folder per class.

    Args:
        root: An existing folder.
        per_class: Number of videos of each class.
        frames: Number of frames of each video.
        height: Height of the frames, even.
        width: Width of the frames, even.
    """
    for number, (name, (down, right)) in enumerate(WINDOW_SHIFTS.items()):
        folder = Path(root) / name
        folder.mkdir()
        for index in range(per_class):
            rng = np.random.default_rng((number, index))
            # The window moves at most 2 pixels per frame. The first window leaves room for the displacements of all frames.
            texture = _texture(rng, height + 2 * frames, width + 2 * frames)
            top, left = (frames if shift == 0 else 0 if shift > 0 else 2 * frames for shift in (down, right))
            encode(folder / f"{index:03}.mp4", [
                texture[top + down * time :, left + right * time :][:height, :width] for time in range(frames)
            ])  # fmt: skip


def encode(path: str | os.PathLike[str], images: list[np.ndarray], *, rate: int = 30) -> None:
    """Write a video, H.264 with a key frame every 12 frames.

    Args:
        path: Path of the file to write.
        images: Frames, (H, W, 3) uint8 each, with even H and W.
        rate: Frames per second.
    """
    import av

    with av.open(os.fspath(path), "w") as file:
        stream = file.add_stream("libx264", rate=rate, options={"crf": "20", "preset": "veryfast", "g": "12"})
        stream.height, stream.width, stream.pix_fmt = *images[0].shape[:2], "yuv420p"
        for image in images:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(image), "rgb24")))
        file.mux(stream.encode())


def _texture(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Return (H, W, 3) uint8 noise: the sum of random squares with sides of 8 and of 24 pixels."""
    coarse = sum(
        np.kron(rng.standard_normal((height // scale + 1, width // scale + 1, 3)), np.ones((scale, scale, 1)))[:height, :width]
        for scale in (8, 24)
    )
    return np.clip(128 + 48 * coarse, 0, 255).astype(np.uint8)
