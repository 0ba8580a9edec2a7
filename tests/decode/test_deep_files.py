"""Files of 16 bits or of many bands, decoded as stored: ``DecodeStage(channels=None)``."""

import io
import itertools
import struct
import zlib
from contextlib import suppress

import numpy as np
import pytest
import torch
from PIL import Image
from support.comparison.values import assert_values
from support.files.encoded_files import encoded
from torchvision.transforms import v2

import gpuaug
from gpuaug.decode.formats import imagecodecs as formats
from gpuaug.decode.headers import parse
from gpuaug.decode.layout import rotated_upright

tifffile = pytest.importorskip("tifffile")
imagecodecs = pytest.importorskip("imagecodecs")


def pixels(height=33, width=20, bands=13, dtype=np.uint16, seed=0):
    limits = np.iinfo(dtype)
    made = np.random.default_rng(seed).integers(limits.min, limits.max, (height, width, bands), dtype, endpoint=True)
    made[0, 0, :] = limits.max
    return made


def tiff(image, **options):
    """A TIFF of an image (h, w, C)."""
    planar = options.pop("planarconfig", "contig")
    stored = image[..., 0] if image.shape[2] == 1 else image.transpose(2, 0, 1) if planar == "separate" else image
    file = io.BytesIO()
    options = {"photometric": "minisblack", "planarconfig": planar if image.shape[2] > 1 else None, "metadata": None, **options}
    tifffile.imwrite(file, np.ascontiguousarray(stored), **options)
    return file.getvalue()


def png(image):
    return bytes(imagecodecs.png_encode(image[..., 0] if image.shape[2] == 1 else image))


def decoded(*files, channels=None, **options):
    return gpuaug.DecodeStage(channels=channels, **options)(gpuaug.collate_encoded(list(files)), "cpu")


def assert_stored(made, *images):
    assert len(made) == len(images)
    for got, image in zip(made, images, strict=True):
        assert_values(got, torch.from_numpy(image.transpose(2, 0, 1)))


LAYOUTS = {
    "strips": {},
    "planes": {"planarconfig": "separate"},
    "tiles, deflate, predictor": {"tile": (16, 16), "compression": "zlib", "predictor": True},
    "planes, tiles, LZW": {"planarconfig": "separate", "tile": (16, 16), "compression": "lzw"},
    "Zstandard": {"compression": "zstd"},
    "other order": {"byteorder": ">"},
    "BigTIFF": {"bigtiff": True},
    "BigTIFF, other order": {"bigtiff": True, "byteorder": ">"},
}


@pytest.mark.parametrize("dtype", [np.uint16, np.int16, np.uint8])
@pytest.mark.parametrize("name", LAYOUTS)
def test_bands_of_a_tiff_are_decoded_as_stored(name, dtype):
    images = [pixels(33, 20, 13, dtype), pixels(21, 40, 13, dtype, seed=1), pixels(17, 17, 13, dtype, seed=2)]
    made = decoded(*(tiff(image, **LAYOUTS[name]) for image in images))
    assert made.data.dtype == getattr(torch, np.dtype(dtype).name)
    assert_stored(made, *images)


@pytest.mark.parametrize("bands", [1, 2, 3, 4])
def test_pngs_and_tiffs_of_16_bits_in_one_batch(bands):
    image, other = pixels(9, 14, bands), pixels(12, 7, bands, seed=1)
    photometric = "rgb" if bands == 3 else "minisblack"
    assert_stored(decoded(png(image), tiff(other, photometric=photometric)), image, other)


@pytest.mark.parametrize("extra", ["unspecified", "assocalpha", "unassalpha"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16])
def test_alpha_of_a_tiff_is_decoded_as_stored(dtype, extra):
    forms = itertools.product(((2, "minisblack"), (4, "rgb"), (5, "rgb")), ("contig", "separate"), (None, "zlib"))
    for (bands, photometric), planarconfig, compression in forms:
        image = pixels(9, 14, bands, dtype)
        options = {"extrasamples": [extra] * (bands - (3 if photometric == "rgb" else 1)), "compression": compression}
        assert_stored(decoded(tiff(image, photometric=photometric, planarconfig=planarconfig, **options)), image)


@pytest.mark.parametrize("shape", [(13, 13, 13), (5, 13, 13), (13, 5, 13), (1, 1, 2), (2, 1, 2)])
@pytest.mark.parametrize("planarconfig", ["contig", "separate"])
def test_bands_as_many_as_a_side_has_pixels(planarconfig, shape):
    image = pixels(*shape)
    assert_stored(decoded(tiff(image, planarconfig=planarconfig)), image)


@pytest.mark.parametrize("bands", [1, 3])
def test_a_transparent_colour_of_a_png_adds_no_channel(bands):
    image = pixels(5, 7, bands)
    file = png(image)
    content = b"tRNS" + bytes(2 * bands)
    chunk = struct.pack(">I", 2 * bands) + content + struct.pack(">I", zlib.crc32(content))
    start = file.index(b"IDAT") - 4
    assert_stored(decoded(file[:start] + chunk + file[start:]), image)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_undone(orientation):
    image = pixels(7, 5, 6)
    file = tiff(image, extratags=[(274, "H", 1, orientation, True)])
    (got,) = decoded(file)
    assert_values(got, torch.from_numpy(np.ascontiguousarray(rotated_upright(image, orientation).transpose(2, 0, 1))))
    (kept,) = decoded(file, exif=False)
    assert_stored([kept], image)


def test_files_of_8_bits_keep_their_channels():
    for mode, channels in (("L", 1), ("LA", 2), ("RGB", 3), ("RGBA", 4), ("P", 3)):
        file = encoded("PNG", mode=mode)
        (got,) = decoded(file)
        assert (got.dtype, got.shape[0]) == (torch.uint8, channels), mode
        if channels in (1, 3):
            assert_values(got, next(iter(decoded(file, channels=channels))))
    assert next(iter(decoded(encoded("JPEG")))).shape[0] == 3
    assert next(iter(decoded(encoded("JPEG", mode="L")))).shape[0] == 1


def test_other_channels_or_types_in_a_batch_are_an_error_at_it():
    first, others = png(pixels(bands=3)), {"1 channel of uint16": png(pixels(bands=1)), "3 channels of uint8": encoded("JPEG")}
    for words, other in others.items():
        text = f"sample 1: it has {words}, and the first image of the batch has 3 channels of uint16"
        with pytest.raises(gpuaug.DecodeError, match=text):
            decoded(first, other)
        made = decoded(first, other, on_error="replace")
        assert_values(made[1], made[0])


def pages(*images, **options):
    """A TIFF with a page per image (h, w[, c]), or per pair of NewSubfileType and image."""
    file = io.BytesIO()
    with tifffile.TiffWriter(file) as writer:
        for image in images:
            kind, image = image if isinstance(image, tuple) else (0, image)
            photometric = "rgb" if image.ndim == 3 else "minisblack"
            writer.write(image, photometric=photometric, metadata=None, subfiletype=kind, contiguous=False, **options)
    return file.getvalue()


OVERVIEW, MASK = 1, 4


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16])
@pytest.mark.parametrize("colours", [1, 3])
def test_pages_of_one_size_and_type_are_bands(colours, dtype):
    bands = pixels(9, 14, 4 * colours, dtype)
    grey = [np.ascontiguousarray(bands[..., first : first + colours].squeeze()) for first in range(0, 4 * colours, colours)]
    assert_stored(decoded(pages(*grey)), bands)
    small, mask = (OVERVIEW, grey[0][::2, ::2]), (MASK, grey[0].reshape(9, -1) > 9)
    assert_stored(decoded(pages(grey[0], small, *grey[1:], mask, small, compression="zlib")), bands)
    if dtype == np.uint8:  # with colours, the first page
        first = grey[0] if colours == 3 else np.repeat(grey[0][..., None], 3, 2)
        assert_stored(decoded(pages(*grey), channels=3), first)


def test_a_stack_as_tifffile_writes_it_is_bands():
    bands, file = pixels(9, 14, 12), io.BytesIO()
    tifffile.imwrite(file, np.ascontiguousarray(bands.transpose(2, 0, 1)), photometric="minisblack")
    assert_stored(decoded(file.getvalue()), bands)


GREY = pixels(9, 14, 1, np.uint8)[..., 0]


@pytest.mark.parametrize(
    "others",
    [[GREY[1:]], [GREY.astype(np.uint16)], [np.repeat(GREY[..., None], 3, 2)], [GREY] * 255],
    ids=["another size", "another type", "other bands", "too many"],
)
def test_pages_that_differ_are_refused_as_stored(others):
    file = pages(GREY, *others)
    with pytest.raises(gpuaug.DecodeError, match="its pages are not the bands of one image"):
        decoded(file)
    assert_stored(decoded(file, channels=1), GREY[..., None])


def test_pages_of_palettes_are_refused_as_stored():
    frames = [Image.fromarray(GREY).convert("P"), Image.fromarray(GREY + 1).convert("P")]
    file = io.BytesIO()
    frames[0].save(file, "TIFF", save_all=True, append_images=frames[1:])
    with pytest.raises(gpuaug.DecodeError, match="its pages are not the bands of one image"):
        decoded(file.getvalue())


def test_with_other_channels_they_are_refused():
    for channels, file in ((3, png(pixels(bands=3))), (1, tiff(pixels(bands=1))), (3, tiff(pixels(bands=5, dtype=np.uint8)))):
        with pytest.raises(gpuaug.DecodeError, match="which is decoded as stored only, with channels=None"):
            decoded(file, channels=channels)


REFUSED = {
    "floating": (lambda: tiff(pixels().astype(np.float32)), "its values are float32, .* tifffile.imread, and return a tensor"),
    "white as 0": (lambda: tiff(pixels(bands=1), photometric="miniswhite"), "neither RGB nor grey with black as 0"),
    "cut off": (lambda: tiff(pixels(300, 300))[:-5000], "Read error|cut|strip|End of file|TiffError"),
    "int8": (lambda: tiff(pixels(bands=1, dtype=np.int8)), "its values are int8"),
    "int8 with 3 bands": (lambda: tiff(pixels(bands=3, dtype=np.int8), photometric="rgb"), "its values are int8"),
    "too many bands": (lambda: tiff(pixels(3, 3, 256)), "256 bands, more than 255"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_decoded_is_an_error(name):
    make, text = REFUSED[name]
    with pytest.raises(gpuaug.DecodeError, match=text):
        decoded(make())


def test_floats_are_read_in_the_dataset_as_the_error_advises(tmp_path):
    image = pixels(bands=1)[..., 0].astype(np.float32)
    tifffile.imwrite(tmp_path / "floats.tif", image)
    dataset = [torch.from_numpy(tifffile.imread(tmp_path / "floats.tif"))[None]]
    (images,) = gpuaug.StreamedLoader(torch.utils.data.DataLoader(dataset), device="cpu")
    assert_values(images[0, 0], torch.from_numpy(image))


def test_a_file_that_is_not_what_its_header_says_is_an_error(monkeypatch):
    file = tiff(pixels(8, 8, 6))
    for shape, dtype in (((9, 9, 6), "uint16"), ((8, 8, 6), "uint8")):
        made = np.zeros(shape, dtype)
        monkeypatch.setattr(imagecodecs, "tiff_decode", lambda data, index, made=made: made)
        with pytest.raises(gpuaug.DecodeError, match=rf"it decodes to {dtype} .*, but its header says uint16 \(8, 8, 6\)"):
            decoded(file)
    monkeypatch.setattr(formats, "imagecodecs", lambda: None)
    with pytest.raises(gpuaug.DecodeError, match="imagecodecs, which decodes it, is not installed"):
        decoded(file)


@pytest.mark.filterwarnings("ignore")  # of PIL
@pytest.mark.parametrize("tag", [256, 257, 258, 262, 274, 277, 284, 339])
@pytest.mark.parametrize("bigtiff", [False, True])
def test_tags_without_values_or_beyond_the_file(tag, bigtiff):
    whole = tiff(pixels(8, 8, 6, np.int16), bigtiff=bigtiff, extratags=[(274, "H", 1, 1, True)])
    at = next(whole.index(entry) for kind in (3, 4) if (entry := struct.pack("<HH", tag, kind)) in whole)
    width = 8 if bigtiff else 4
    for field, value in ((at + 4, 0), (at + 4, 2 ** (8 * width) - 1), (width, 2 ** (8 * width) - 1)):
        data = bytearray(whole)
        data[field : field + width] = value.to_bytes(width, "little")
        header = parse(bytes(data))
        assert bool(header.problem) == (header.format == 0)


@pytest.mark.filterwarnings("ignore")  # of PIL
@pytest.mark.parametrize("seed", range(60))
def test_damaged_tags_are_a_header_or_a_problem(seed):
    rng = np.random.default_rng(seed)
    data = bytearray(tiff(pixels(8, 8, 6), bigtiff=bool(seed % 2)))
    for place in rng.integers(4, 200, 1 + seed % 7):
        data[place] = rng.integers(256)
    data = bytes(data[: rng.integers(8, len(data))] if seed % 3 == 0 else data)
    header = parse(data)
    assert bool(header.problem) == (header.format == 0)
    with suppress(gpuaug.DecodeError):
        decoded(data, max_pixels=10_000)


def test_a_pipeline_takes_them_from_files_to_floats(tmp_path):
    images = [pixels(40 + side, 50, 6, seed=side) for side in range(4)]
    for index, image in enumerate(images):
        (tmp_path / f"{index}.tif").write_bytes(tiff(image))
    dataset = [(gpuaug.read_encoded(tmp_path / f"{index}.tif"), index) for index in range(4)]
    augment = gpuaug.fuse(
        [v2.RandomCrop((24, 24)), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 6, [0.25] * 6)], ragged=True
    )
    source = torch.utils.data.DataLoader(dataset, batch_size=2, collate_fn=gpuaug.collate_encoded)
    stages = [gpuaug.DecodeStage(channels=None), augment]
    with gpuaug.StreamedLoader(source, stages, device="cpu", seed=0) as loader:
        found = [made for made, _ in loader]
        assert loader.stats().undecoded_pixels == 0
    values = {0.25 * value + 0.5 for made in found for value in made[:, 0].flatten().tolist()}
    assert all(made.shape == (2, 6, 24, 24) for made in found)
    shares = np.unique(np.concatenate([image[..., 0].flatten() for image in images])) / 65535
    assert np.abs(shares[:, None] - np.array(sorted(values))[None]).min(0).max() < 1e-6
