"""The folder of the documentation's pictures, and how pictures of photographs are written there."""

import io
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

IMAGES = Path("docs/images")


def save(figure: Figure, target: Path) -> None:
    """Write a picture without the two lowest bits of its colours: noise to the eye, and most of the file."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    target.parent.mkdir(parents=True, exist_ok=True)
    with Image.open(drawn) as image:
        # The upper bits again in the place of the lower ones, so that white stays white.
        colours = np.asarray(image.convert("RGB")) >> 2
        Image.fromarray(colours << 2 | colours >> 4).save(target, optimize=True)
