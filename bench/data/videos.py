"""Folders of H.264 videos with a key frame every 50 frames, encoded by PyAV from moving textures."""

import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SIZES = {"340x256": (256, 340), "1280x720": (720, 1280)}
"""Name of a set: height and width of its frames in pixels."""

FRAMES, KEY_FRAME_INTERVAL = 300, 50
DISTINCT, FILES = 4, 48
"""Number of videos that are encoded, and number of files; the other files are copies."""


def folder(root: Path, size: str) -> list[str]:
    """Return the paths of the videos of a set. Missing videos are encoded."""
    import av

    height, width = SIZES[size]
    paths = [root / size / f"{number:02}.mp4" for number in range(FILES)]
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(paths):
        if path.exists():
            continue
        if number >= DISTINCT:
            shutil.copy(paths[number % DISTINCT], path)
            continue
        with av.open(str(path), "w") as file:
            stream = file.add_stream(
                "libx264", rate=30, options={"crf": "24", "preset": "medium", "g": str(KEY_FRAME_INTERVAL)}
            )
            stream.height = height
            stream.width = width
            stream.pix_fmt = "yuv420p"
            texture = _texture(2 * height, 2 * width, number)
            for index in range(FRAMES):
                top = int(height * (0.5 + 0.45 * np.sin(index / 23)))
                left = int(width * (0.5 + 0.45 * np.cos(index / 31)))
                frame = np.ascontiguousarray(texture[top : top + height, left : left + width])
                file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
            file.mux(stream.encode())
    return [str(path) for path in paths]


def _texture(height: int, width: int, seed: int) -> NDArray[np.uint8]:
    """Return noise of five scales, (H, W, 3)."""
    rng = np.random.default_rng(seed)
    total = np.zeros((height, width, 3), np.float32)
    for scale in (4, 8, 16, 32, 64):
        coarse = rng.standard_normal((height // scale + 1, width // scale + 1, 3)).astype(np.float32)
        total += np.kron(coarse, np.ones((scale, scale, 1), np.float32))[:height, :width] * scale**0.5
    return np.clip(128 + 48 * (total - total.mean()) / total.std(), 0, 255).astype(np.uint8)
