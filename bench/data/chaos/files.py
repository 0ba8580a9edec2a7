"""Files of ``python -m bench chaos``, and a processor of images."""

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

FILE_PX = 40, 32
"""Height and width of the images in files, in pixels."""


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="gpuaug-chaos-"))
    process = os.getpid()  # workers, which are forks, must not remove the folder
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == process else None)
    return folder


def jpeg_file(seed: int) -> Path:
    """Return a JPEG file of one of 64 images."""
    from PIL import Image

    path = _folder() / f"{seed % 64}.jpg"
    if not path.exists():
        pixels = torch.randint(0, 256, (*FILE_PX, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed % 64))
        partial = path.with_suffix(f".{os.getpid()}")
        Image.fromarray(pixels.numpy()).save(partial, "JPEG")
        partial.replace(path)  # at once: another worker may read the file
    return path


def video_file() -> Path:
    """Return a video of ten frames."""
    import av

    path = _folder() / "video.mp4"
    if path.exists():
        return path
    partial = path.with_suffix(f".{os.getpid()}.mp4")
    with av.open(str(partial), "w") as file:
        stream = file.add_stream("libx264", rate=10)
        stream.height, stream.width = 64, 80
        stream.pix_fmt = "yuv420p"
        generator = torch.Generator().manual_seed(0)
        for _ in range(10):
            pixels = torch.randint(0, 256, (64, 80, 3), dtype=torch.uint8, generator=generator)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels.numpy(), format="rgb24")))
        file.mux(stream.encode(None))
    partial.replace(path)
    return path


class ViTImageProcessor:
    """Processor with the name, the settings and the arithmetic of a class of transformers, which need not be installed."""

    __module__ = "transformers.models.vit.image_processing_vit"
    do_resize = do_rescale = do_normalize = True
    rescale_factor = 1 / 255
    resample = 2
    size = {"height": 16, "width": 24}  # noqa: RUF012 - as in transformers
    image_mean = (0.5, 0.4, 0.3)
    image_std = (0.2, 0.25, 0.3)

    def __call__(self, images: list[Tensor], return_tensors: str) -> dict[str, Tensor]:
        sides = tuple(self.size.values())
        mean, std = (torch.tensor(numbers)[:, None, None] * 255 for numbers in (self.image_mean, self.image_std))
        resized = [
            functional.interpolate(image[None].float(), sides, mode="bilinear", antialias=True)[0].clamp(0, 255).round()
            for image in images
        ]
        return {"pixel_values": torch.stack([(image - mean) / std for image in resized])}
