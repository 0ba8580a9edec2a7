"""Pack photographs of installed packages into a folder, from which the sets *plain* and *web* are made on another machine.

    python -m bench photographs DIR
    python -m bench files --cases web --photographs DIR

Packages with photographs: scikit-image and scikit-learn; Debian's mate-backgrounds, lomiri-wallpapers-16.04 and
lomiri-wallpapers-20.04. Packages that are not installed are left out. ``--backgrounds`` is the folder of Debian's photographs
if the packages were unpacked elsewhere. Drawings and textures of the same packages are left out, because they compress unlike
photographs. Licences: see each package; the folder is for measurements, not for distribution.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

from gpuaug.benchkit.environment import allowed_cores

BACKGROUNDS = Path("/usr/share/backgrounds")
"""Folder in which Debian's packages install their photographs."""

MAX_SIDE_PX = 1600
"""Largest side of a photograph in pixels. Larger photographs are downscaled."""

_DEBIAN = (
    *("mate/nature/Aqua", "mate/nature/Blinds", "mate/nature/Dune", "mate/nature/FreshFlower", "mate/nature/Garden"),
    *("mate/nature/GreenMeadow", "mate/nature/LadyBird", "mate/nature/RainDrops", "mate/nature/Storm", "mate/nature/TwoWings"),
    *("mate/nature/Wood", "mate/nature/YellowFlower", "Bridge_by_Sander_Klootwijk", "Dragonfly_by_Bolly"),
    *("Kleiber_by_Lukas_Baubkus", "Picture_0B_by_freespace", "Picture_1A_by_freespace", "Wine_by_Jakkub_Mede"),
    *("aitzgorri_by_Aitzol_Berasategi", "free_by_Peter_Nerlich", "friends_by_Aitzol_Berasategi", "greentock_by_Peter_Nerlich"),
    *("life_by_Aitzol_Berasategi", "picosdeeuropa_by_Aitzol_Berasategi", "seeding_by_Clements_Engelhardt"),
    "sunset_by_Aitzol_Berasategi",
)
_WHEELS = {
    ("skimage", "data"): (
        *("astronaut.png", "chelsea.png", "coffee.png", "hubble_deep_field.jpg"),
        *("motorcycle_left.png", "retina.jpg", "rocket.jpg"),
    ),
    ("sklearn", "datasets", "images"): ("china.jpg", "flower.jpg"),
}
_QUALITY = 92


def paths(folder: Path | None = None, *, backgrounds: Path = BACKGROUNDS) -> list[Path]:
    """Return the paths of the photographs, sorted by name.

    Args:
        folder: Folder of packed photographs. Default: photographs of installed packages.
        backgrounds: Folder of Debian's photographs, used without ``folder``.

    Raises:
        FileNotFoundError: If there are no photographs.
    """
    if folder is not None:
        files = list(folder.glob("*.jpg"))
    else:
        files = [path for name in _DEBIAN if (path := backgrounds / f"{name}.jpg").is_file()]
        for (package, *parts), names in _WHEELS.items():
            # find_spec instead of an import, because the import of scikit-learn takes seconds.
            spec = find_spec(package)
            for root in (spec and spec.submodule_search_locations) or ():
                files += [path for name in names if (path := Path(root, *parts, name)).is_file()]
    if not files:
        raise FileNotFoundError(
            f"There are no photographs to read, because {folder or 'the installed scikit-image'} has none. "
            "Pack some with python -m bench photographs, or install scikit-image from a wheel."
        )
    return sorted(files, key=lambda path: path.stem)


def load(path: Path) -> Image.Image:
    """Load a photograph as RGB, downscaled to at most ``MAX_SIDE_PX`` pixels per side."""
    with Image.open(path) as opened:
        image = opened.convert("RGB")
    image.thumbnail((MAX_SIDE_PX, MAX_SIDE_PX), Image.Resampling.LANCZOS)
    return image


def pack(folder: Path, backgrounds: Path = BACKGROUNDS) -> list[Path]:
    """Write the photographs of installed packages into ``folder``, and return their paths there."""
    sources = paths(backgrounds=backgrounds)
    folder.mkdir(parents=True, exist_ok=True)

    def write(path: Path) -> Path:
        packed = folder / f"{path.stem}.jpg"
        load(path).save(packed, quality=_QUALITY, subsampling="4:4:4", optimize=True)
        return packed

    with ThreadPoolExecutor(allowed_cores()) as pool:
        return list(pool.map(write, sources))


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(
        prog="python -m bench photographs", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder to write into")
    parser.add_argument("--backgrounds", type=Path, default=BACKGROUNDS, help="(default: %(default)s)")
    options = parser.parse_args(argv)
    packed = pack(options.folder, options.backgrounds)
    print(f"{len(packed)} photographs, {sum(path.stat().st_size for path in packed) / 1e6:.1f} MB")
