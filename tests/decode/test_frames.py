"""JPEGs by the marker and precision of their frame: refused, or decoded to the size that was checked and nowhere else."""

import functools
import itertools
import struct

import numpy as np
import pytest
import torch
from PIL import Image
from support.files.encoded import by_pil
from support.files.encoded_files import APP1, DHT, SOF0, SOS, changed, inserted, jpeg, segment
from support.files.exif_files import exif
from support.files.guarded_simplejpeg import guarded
from support.files.other_encoders import files

from gpuaug import DecodeStage, StreamedLoader, collate_encoded
from gpuaug.core.encoded import Format
from gpuaug.decode.headers import parse

MARKERS = sorted(set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC})
DECODED = {0xC0, 0xC1, 0xC2, 0xC3, 0xC9, 0xCA}


@pytest.fixture(autouse=True)
def _guarded():
    with guarded():
        yield


def frame_of(data):
    return next(marker for marker in MARKERS if struct.pack(">BB", 0xFF, marker) in data[: data.index(b"\xff\xda")])


def decoded(files, **options):
    """The image of each file, (h, w, C), or ``None`` if it is refused."""
    stage = DecodeStage(backend="cpu", on_error="replace", max_replaced=1, **options)
    batch = [collate_encoded(files), torch.arange(len(files))]
    ((images, sources),) = StreamedLoader([batch], [stage], device="cpu")
    accepted = sources == torch.arange(len(files))  # the others hold the image and the number of another sample
    return [image.permute(1, 2, 0).numpy() if fits else None for image, fits in zip(images, accepted, strict=True)]


def size_of(header, min_side):
    """(height, width) that an image is decoded to: whole if it is lossless."""
    if min_side is None or header.format is Format.LOSSLESS_JPEG:
        return header[:2]
    scale = max(scale for scale in (1, 2, 4, 8) if scale == 1 or -(-min(header[:2]) // scale) >= min_side)
    return -(-header.height // scale), -(-header.width // scale)


def test_there_is_a_file_of_every_frame_that_is_decoded():
    assert {frame_of(data) for data in files().values()} == DECODED


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("min_side", [None, 1, 20])
def test_files_of_every_frame_are_decoded_to_the_size_of_their_header(min_side, channels, orientation):
    content = b"Exif\0\0" + exif(orientation)
    segment_bytes = struct.pack(">BBH", 0xFF, APP1, len(content) + 2) + content
    turned = [file[:2] + segment_bytes + file[2:] for file in files().values()]
    for name, data, image in zip(files(), turned, decoded(turned, channels=channels, min_side=min_side), strict=True):
        header = parse(data)
        assert (image is None) == ("of 12 bits" in name or "of 16 bits" in name), name
        if image is None:
            continue
        size = size_of(header, min_side)
        assert image.shape == (*(size[::-1] if orientation == 6 else size), channels), name
        if size == header[:2] and channels == 3:
            assert np.array_equal(image, by_pil(data)), name


@pytest.mark.parametrize("channels", [3, 1])
def test_lossless_files_are_exactly_their_pixels(channels):
    lossless = {name: data for name, data in files().items() if parse(data).format is Format.LOSSLESS_JPEG}
    for min_side in (None, 5):
        images = decoded(list(lossless.values()), channels=channels, min_side=min_side)
        for (name, data), image in zip(lossless.items(), images, strict=True):
            wanted = Image.fromarray(by_pil(data)).convert("RGB" if channels == 3 else "L")
            assert np.array_equal(image, np.asarray(wanted).reshape(image.shape)), name


@functools.cache
def lies():
    return list(_lies())


def _lies():
    """Files whose frame says something else than their scan, or that have more than one frame."""
    sources = [jpeg(64, 48), jpeg(64, 48, mode="L"), jpeg(64, 48, progressive=True), jpeg(64, 48, mode="CMYK")]
    sources += [files()["imagecodecs lossless RGB"], files()["imagecodecs lossless grey"], files()["cjpeg arithmetic"]]
    for source in sources:
        own = frame_of(source)
        at = segment(source, own)
        frame = source[at : at + 2 + int.from_bytes(source[at + 2 : at + 4], "big")]
        for marker, precision in itertools.product(MARKERS, (1, 2, 7, 8, 12, 16)):
            yield changed(changed(source, own, 4, bytes([precision])), own, 1, bytes([marker]))
        for marker, side in itertools.product(MARKERS, (8, 64, 150)):
            other = bytes([0xFF, marker]) + frame[2:5] + struct.pack(">HH", side, side) + frame[9:]
            yield inserted(source, SOS, other)
            yield source[:at] + other + source[at:]
        for height, width in ((0, 48), (64, 0), (8, 8), (240, 180)):
            lie = changed(source, own, 5, struct.pack(">HH", height, width))
            yield lie
            yield lie[:-2] + b"\xff\xdc\0\4\0\x40" + lie[-2:]  # DNL: the number of lines, behind the first scan
        for channels in (0, 1, 2, 3, 4, 5, 255):
            yield changed(source, own, 9, bytes([channels]))
        yield source[:2] + b"\xff\xde" + frame[2:] + source[2:]  # DHP: hierarchical
        yield inserted(source, own, b"\xff\xfe\0\0")  # a segment shorter than its length
        for between in (b"\xff\xd8", b"\xff\x01", b"\xff\xd0", b"\0\xff\0", b"\xff\xff\xff"):
            yield inserted(source, own, between)
    yield inserted(jpeg(64, 48), DHT, jpeg(640, 480)[segment(jpeg(640, 480), SOF0) : segment(jpeg(640, 480), DHT)])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "first", "step"),
    [({}, 0, 1), ({"min_side": 8}, 0, 2), ({"min_side": 8, "channels": 1}, 1, 2)],
    ids=["whole", "at least 8 pixels", "one channel"],
)
def test_a_frame_that_lies_is_refused_or_decoded_to_the_size_that_it_says(options, first, step):
    files = lies()[first::step]
    images = decoded(files, max_pixels=10**6, **options)
    for data, image in zip(files, images, strict=True):
        assert image is None or image.shape[:2] == size_of(parse(data), options.get("min_side"))
    refused = sum(image is None for image in images)
    assert 20 < refused < len(images) - 20
