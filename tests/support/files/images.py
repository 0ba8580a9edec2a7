"""Random images for the tests that pack them: arrays, PIL images and PNG files."""

import io

import numpy as np
import PIL.Image
import torch


def noise(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def pil(seed, height, width, mode="RGB"):
    image = PIL.Image.fromarray(noise(seed, height, width, 3))
    if mode in {"PA", "LA"}:
        image = image.convert("RGBA")
    return image.convert("L").convert(mode) if mode == "PA" else image.convert(mode)


def png(image):
    packed = io.BytesIO()
    image.save(packed, "PNG")
    return torch.frombuffer(bytearray(packed.getvalue()), dtype=torch.uint8)
