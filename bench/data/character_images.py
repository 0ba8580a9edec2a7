"""A labelled set of images from installed packages: characters of matplotlib's fonts over scikit-image's photographs.

    python -m bench accuracy --make DIR

Every image is one character, in one colour and slightly rotated, over a crop of a photograph. Its class is the character: A to
Z and 2 to 9, since 0 and 1 look like O and I. Sides are 96 to 384 pixels, with aspect ratios of photographs, so that batches
are ragged and images are downscaled to a model's small input. Training and validation share neither a typeface nor a
photograph: training has the twelve faces of DejaVu Sans, DejaVu Serif and STIX over eight photographs, validation the nine
faces of DejaVu Sans Mono and Computer Modern over four. The default number of copies gives 4080 and 918 images.

Photographs alone would be smaller still: there are a dozen, without labels. The files are JPEGs as
``torchvision.datasets.ImageFolder`` reads them, and the same arguments give the same images.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import resources
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw, ImageFont

from gpuaug.benchkit.environment import allowed_cores
from gpuaug.benchkit.photos import PHOTOGRAPHS

CLASSES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ23456789"

FACES = {
    "train": [
        *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
        *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
        *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
    ],
    "val": [
        *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
        *("cmr10", "cmb10", "cmss10", "cmti10", "cmtt10"),
    ],
}
"""The faces of each part, by the names of matplotlib's font files."""

_SIDES_PX = (144, 384)  # of the longer side
# Shorter side over the longer, as in photographs. If no drawn crop fits into an image, Kornia takes the largest one at a random
# place and torchvision at the centre: with long images the suite would measure that difference.
_SHAPES = (0.67, 1.0)
_HEIGHTS = (0.4, 0.8)  # of a character, over the smaller side
_TURNS_DEGREES = (-20, 20)
_CONTRAST = 48  # of 255: least difference in lightness between a character and the mean of its background


def make(root: Path, *, copies: int = 10, faces: int | None = None) -> None:
    """Write ``root/train/CLASS/*.jpg`` and ``root/val/CLASS/*.jpg``.

    Args:
        root: Created if it does not exist.
        copies: Images of each character in each face. Validation has a third as many, one at least.
        faces: Number of faces of each part. Left out: all.

    Raises:
        FileNotFoundError: If scikit-image ships too few photographs.
    """
    # Every third photograph, in order of names, is for validation.
    photographs = {"train": [], "val": []}
    for index, photograph in enumerate(_photographs()):
        photographs["val" if index % 3 == 2 else "train"].append(photograph)

    def write(part: str, character: str) -> None:
        folder = root / part / character
        folder.mkdir(parents=True, exist_ok=True)
        for face in FACES[part][:faces]:
            for copy in range(copies if part == "train" else max(1, copies // 3)):
                draw = Random(f"{character} {face} {copy}")
                image = _image(character, face, draw.choice(photographs[part]), draw)
                image.save(folder / f"{face}_{copy}.jpg", quality=90)

    with ThreadPoolExecutor(allowed_cores()) as pool:  # Pillow releases the GIL while it draws and encodes
        for part in FACES:
            list(pool.map(partial(write, part), CLASSES))


def _image(character: str, face: str, photograph: Image.Image, draw: Random) -> Image.Image:
    """One character over a crop of a photograph."""
    longer = draw.randint(_SIDES_PX[0], min(_SIDES_PX[1], *photograph.size))
    sides = [longer, round(longer * draw.uniform(*_SHAPES))]
    draw.shuffle(sides)
    width, height = sides
    left, top = draw.randint(0, photograph.width - width), draw.randint(0, photograph.height - height)
    image = photograph.crop((left, top, left + width, top + height))
    font = ImageFont.truetype(str(_fonts() / f"{face}.ttf"), round(draw.uniform(*_HEIGHTS) * min(width, height) / 0.75))
    # As large as the image, so that turning it moves the character about the middle of the image.
    shape = Image.new("L", image.size)
    ImageDraw.Draw(shape).text((width / 2, height / 2), character, fill=255, font=font, anchor="mm")
    shape = shape.rotate(draw.uniform(*_TURNS_DEGREES), resample=Image.Resampling.BICUBIC)
    box = shape.getbbox() or (0, 0, width, height)
    around = _lightness(image.crop(box).resize((1, 1), Image.Resampling.BOX).getpixel((0, 0)))
    colour = (0, 0, 0)
    for _ in range(100):
        colour = (draw.randrange(256), draw.randrange(256), draw.randrange(256))
        if abs(_lightness(colour) - around) >= _CONTRAST:
            break
    image.paste(colour, mask=shape)
    return image


def _lightness(colour: tuple[int, ...]) -> float:
    return 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]


def _photographs() -> list[Image.Image]:
    sources = resources.files("skimage").joinpath("data")
    found = []
    for name in PHOTOGRAPHS:
        if sources.joinpath(name).is_file():
            with sources.joinpath(name).open("rb") as file, Image.open(file) as opened:
                found.append(opened.convert("RGB"))
    if len(found) < 3:
        raise FileNotFoundError(
            f"There are too few photographs, because scikit-image has {len(found)} of them in {sources}. "
            "Install it from a wheel, or pass a folder of your own with --data."
        )
    return found


def _fonts() -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf"
