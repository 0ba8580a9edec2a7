"""Folder of the pictures in the documentation, and the function that writes pictures of photographs."""

import io
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

IMAGES = Path("docs/images")


def save(figure: Figure, target: Path) -> None:
    """Write a picture without the two lowest bits of its colours, which are invisible but take most of the file."""
    png = io.BytesIO()
    figure.savefig(png, format="png")
    target.parent.mkdir(parents=True, exist_ok=True)
    with Image.open(png) as image:
        # Fill the lowest bits with the highest bits, so that white stays white.
        colours = np.asarray(image.convert("RGB")) >> 2
        Image.fromarray(colours << 2 | colours >> 4).save(target, optimize=True)
