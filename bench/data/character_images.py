"""A labelled image dataset from installed packages: characters of matplotlib's fonts over scikit-image's photographs.

    python -m bench accuracy --make DIR

Every image shows one character, in one colour and slightly rotated, over a crop of a photograph. Its class is the character: A
to Z and 2 to 9, since 0 and 1 look like O and I. Sides are 96 to 384 pixels, with aspect ratios of photographs: batches are
ragged, and images are downscaled to the small input of a model. Training and validation have different typefaces and
photographs: training has the twelve typefaces of DejaVu Sans, DejaVu Serif and STIX over eight photographs, validation the nine
typefaces of DejaVu Sans Mono and Computer Modern over four. The default number of copies gives 4080 and 918 images.

The files are JPEGs in class folders, as ``torchvision.datasets.ImageFolder`` reads them. Equal arguments give equal images.
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

TYPEFACES = {
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
"""Names of matplotlib's font files for each split."""

_SIDES_PX = (144, 384)  # of the longer side
# Shorter side over longer side, as in photographs. If no drawn crop fits into an image, Kornia uses the largest crop at a
# random position, and torchvision at the centre. With elongated images the suite would measure that difference.
_ASPECTS = (0.67, 1.0)
_HEIGHTS = (0.4, 0.8)  # height of a character over the shorter side
_ROTATION_DEGREES = (-20, 20)
_CONTRAST = 48  # smallest difference in lightness, of 255, between a character and the mean of its background


def make(root: Path, *, copies: int = 10, typefaces: int | None = None) -> None:
    """Write ``root/train/CLASS/*.jpg`` and ``root/val/CLASS/*.jpg``.

    Args:
        root: Folder of the dataset, created if it does not exist.
        copies: Number of images per character and typeface. Validation has a third as many, at least one.
        typefaces: Number of typefaces per split. Default: all.

    Raises:
        FileNotFoundError: If scikit-image ships too few photographs.
    """
    # Every third photograph, in the order of PHOTOGRAPHS, is for validation.
    photographs = {"train": [], "val": []}
    for index, photograph in enumerate(_photographs()):
        photographs["val" if index % 3 == 2 else "train"].append(photograph)

    def write(split: str, character: str) -> None:
        folder = root / split / character
        folder.mkdir(parents=True, exist_ok=True)
        for typeface in TYPEFACES[split][:typefaces]:
            for copy in range(copies if split == "train" else max(1, copies // 3)):
                generator = Random(f"{character} {typeface} {copy}")
                image = _image(character, typeface, generator.choice(photographs[split]), generator)
                image.save(folder / f"{typeface}_{copy}.jpg", quality=90)

    with ThreadPoolExecutor(allowed_cores()) as pool:  # Pillow releases the GIL while it draws and encodes
        for split in TYPEFACES:
            list(pool.map(partial(write, split), CLASSES))


def _image(character: str, typeface: str, photograph: Image.Image, generator: Random) -> Image.Image:
    """Draw one character over a crop of a photograph."""
    longer = generator.randint(_SIDES_PX[0], min(_SIDES_PX[1], *photograph.size))
    sides = [longer, round(longer * generator.uniform(*_ASPECTS))]
    generator.shuffle(sides)
    width, height = sides
    left, top = generator.randint(0, photograph.width - width), generator.randint(0, photograph.height - height)
    image = photograph.crop((left, top, left + width, top + height))
    font = ImageFont.truetype(
        str(_fonts() / f"{typeface}.ttf"), round(generator.uniform(*_HEIGHTS) * min(width, height) / 0.75)
    )
    # As large as the image, so that the rotation is about the centre of the image.
    mask = Image.new("L", image.size)
    ImageDraw.Draw(mask).text((width / 2, height / 2), character, fill=255, font=font, anchor="mm")
    mask = mask.rotate(generator.uniform(*_ROTATION_DEGREES), resample=Image.Resampling.BICUBIC)
    box = mask.getbbox() or (0, 0, width, height)
    background = _lightness(image.crop(box).resize((1, 1), Image.Resampling.BOX).getpixel((0, 0)))
    colour = (0, 0, 0)
    for _ in range(100):
        colour = (generator.randrange(256), generator.randrange(256), generator.randrange(256))
        if abs(_lightness(colour) - background) >= _CONTRAST:
            break
    image.paste(colour, mask=mask)
    return image


def _lightness(colour: tuple[int, ...]) -> float:
    return 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]


def _photographs() -> list[Image.Image]:
    sources = resources.files("skimage").joinpath("data")
    images = []
    for name in PHOTOGRAPHS:
        if sources.joinpath(name).is_file():
            with sources.joinpath(name).open("rb") as file, Image.open(file) as opened:
                images.append(opened.convert("RGB"))
    if len(images) < 3:
        raise FileNotFoundError(
            f"There are too few photographs, because scikit-image has {len(images)} of them in {sources}. "
            "Install it from a wheel, or pass a folder of your own with --data."
        )
    return images


def _fonts() -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf"
