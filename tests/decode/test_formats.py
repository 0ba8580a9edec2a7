"""Every format that is decoded, in every mode: recognised in every form of a sample, with PIL's pixels, or refused."""

import itertools

import numpy as np
import pytest
import torch
from support.files.encoded import by_pil
from support.files.encoded_files import encoded
from support.files.exif_files import exif, tiff
from support.files.held_bytes import HELD
from support.files.image_formats import formats
from support.files.images import noise

from gpuaug import ArgumentTypeError, DecodeError, DecodeStage, Encoded, collate_encoded, read_encoded
from gpuaug.core.encoded import Format
from gpuaug.decode.headers import parse
from gpuaug.decode.layout import rotated_upright

pytestmark = pytest.mark.filterwarnings("ignore:Palette images with Transparency")

NAMES = list(formats())


def decoded(files, **options):
    images = DecodeStage(backend="cpu", **options)(collate_encoded(list(files)), "cpu")
    return [image.permute(1, 2, 0).numpy() for image in images]


def decoded_or_none(data):
    try:
        return decoded([data])[0]
    except DecodeError:
        return None


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("upright", [True, False])
def test_every_format_has_the_pixels_of_pil(mode, upright):
    options = {"channels": 3 if mode == "RGB" else 1, "exif": upright}
    for name, image in zip(NAMES, decoded(formats().values(), **options), strict=True):
        if mode == "L" and name.startswith("JPEG CMYK"):
            continue  # no luma in the file
        assert np.array_equal(image, by_pil(formats()[name], mode=mode, upright=upright)), name


@pytest.mark.parametrize("orientation", range(10))
def test_every_mode_is_turned_as_by_pil(orientation):
    tag = exif(orientation)
    files = {f"JPEG {mode}": encoded("JPEG", 7, 11, mode, exif=b"Exif\0\0" + tag) for mode in ("RGB", "L", "CMYK")}
    files |= {f"PNG {mode}": encoded("PNG", 7, 11, mode, exif=tag) for mode in ("RGB", "L", "1", "P", "RGBA", "LA")}
    files |= {f"WebP {mode}": encoded("WEBP", 7, 11, mode, exif=tag) for mode in ("RGB", "RGBA")}
    for mode in ("RGB", "L", "1", "P", "RGBA", "LA", "CMYK", "YCbCr"):
        for compression in ("raw", "tiff_lzw") if 1 <= orientation <= 8 else ("raw",):  # libtiff writes no other
            options = {"tiffinfo": {274: orientation}, "compression": compression}
            files[f"TIFF {mode} {compression}"] = encoded("TIFF", 7, 11, mode, **options)
    for name, image, stored in zip(files, decoded(files.values()), decoded(files.values(), exif=False), strict=True):
        assert np.array_equal(image, by_pil(files[name])), name
        assert stored.shape == (7, 11, 3), name
        assert np.array_equal(image, rotated_upright(torch.from_numpy(stored), orientation % 9).numpy()), name


@pytest.mark.parametrize("hold", HELD.values(), ids=HELD.keys())
def test_bytes_of_every_format_are_an_image_beside_a_label(hold):
    for name, data in formats().items():
        images, labels = collate_encoded([(hold(data), 3)])
        assert type(images) is Encoded, name
        assert (images.file(0).tobytes(), images.headers.problems, labels.tolist()) == (data, {}, [3]), name


def test_files_of_every_format_are_read_by_their_path(tmp_path):
    for name, data in formats().items():
        path = tmp_path / name
        path.write_bytes(data)
        images, _ = collate_encoded([(read_encoded(path), 3), (path, 4)])
        assert images.headers.problems == {}, name


LABELS = [b"P", b"P5", b"P6\n", b"P1 cat", b"P7 1 1", b"Py", b"Pf", b"P\n3 4", b"3", b"", b"RIFF", b"II", b"ftyp", b"GIF"]


@pytest.mark.parametrize("label", LABELS)
def test_labels_that_begin_like_a_magic_number_are_labels(label):
    images, labels = collate_encoded([(encoded("PNG"), label)])
    assert (type(images), labels) == (Encoded, [label])
    with pytest.raises(ArgumentTypeError):
        collate_encoded([(label, 3)])


PHOTOMETRIC = {"minisblack": 1, "miniswhite": 1, "rgb": 3, "separated": 4}
"""Colours of each interpretation of a TIFF's bands."""
UNSPECIFIED, PREMULTIPLIED_ALPHA, ALPHA = 0, 1, 2


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("planar", ["contig", "separate"])
def test_a_tiff_of_more_bands_than_colours_is_refused(planar, order):
    """PIL decodes some of their bands without a word. Alpha alone is left out."""
    kinds = (UNSPECIFIED, PREMULTIPLIED_ALPHA, ALPHA)
    most = 3 if (planar, order) == ("contig", "<") else 2
    extras = [each for count in range(most + 1) for each in itertools.product(kinds, repeat=count)]
    images = refused = 0
    for (photometric, colours), extra in itertools.product(PHOTOMETRIC.items(), extras):
        pixels = noise(0, 5, 9, colours + len(extra))
        pixels = pixels.transpose(2, 0, 1) if planar == "separate" else pixels
        data = tiff(
            pixels[0] if pixels.shape[0] == 1 else pixels,
            order,
            photometric=photometric,
            planarconfig=planar if colours + len(extra) > 1 else None,
            extrasamples=extra or None,
        )
        image = decoded_or_none(data)
        if image is None:
            refused += 1
            assert extra, photometric
        else:
            images += 1
            assert extra in ((), (ALPHA,), (PREMULTIPLIED_ALPHA,)), (photometric, extra)
            assert np.array_equal(image, by_pil(data)), (photometric, extra)
    assert images >= len(PHOTOMETRIC)
    assert refused > images


def test_bands_that_would_be_left_out_are_counted():
    for extra in ((0, 0), (2, 0)):
        header = parse(tiff(noise(0, 5, 9, 5), extrasamples=extra))
        assert (header.format, header.stored_channels, header.problem) == (Format.DEEP, 5, "")
