"""Masks decoded with ``channels="labels"``, and warnings about files of masks that are decoded to colours, or not turned."""

import io
import itertools
import re
import struct
import warnings
import zlib

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from support.files.decode_devices import on_each_device
from torchvision.transforms import v2

import gpuaug
from gpuaug import DecodeError, DecodeStage, GpuAugWarning, StreamedLoader, TransformStage, collate_encoded

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 4, (13, 19)).astype(np.uint8)
DEEP = RNG.integers(0, 60_000, (13, 19)).astype(np.uint16)
BITS = (LABELS > 1).astype(np.uint8)
COLOURS = RNG.permutation(768).astype(np.uint8).tobytes()


def packed(image, form, **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def palette(values):
    image = Image.fromarray(values, "P")
    image.putpalette(COLOURS)
    return image


def png_of_bits(values, depth, colour_type=0):
    """A PNG of 1, 2, 4 or 8 bits per pixel, written by hand, because PIL does not write all of these depths."""
    bits = np.unpackbits(values[..., None], axis=-1)[..., 8 - depth :].reshape(len(values), -1)
    rows = b"".join(b"\0" + np.packbits(row).tobytes() for row in bits)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", *values.shape[::-1], depth, colour_type, 0, 0, 0))]
    chunks += [(b"PLTE", COLOURS[: 3 * 2**depth])] if colour_type == 3 else []
    chunks += [(b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    checked = ((kind + content, len(content)) for kind, content in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", length) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk, length in checked
    )


def tiff(values, **options):
    file = io.BytesIO()
    tifffile.imwrite(file, values, **options)
    return file.getvalue()


GREY, MANY = Image.fromarray(LABELS), np.stack([LABELS] * 5, -1)
FILES = {
    **{f"grey {form}": (packed(GREY, form), LABELS) for form in ("PNG", "GIF", "TIFF", "BMP", "PPM", "JPEG2000")},
    **{f"palette {form}": (packed(palette(LABELS), form), LABELS) for form in ("PNG", "GIF", "TIFF", "BMP")},
    **{f"bits {form}": (packed(Image.fromarray(LABELS > 1), form), BITS) for form in ("PNG", "TIFF", "BMP", "PPM")},
    "transparent palette": (packed(palette(LABELS), "PNG", transparency=0), LABELS),
    "compressed bits": (packed(Image.fromarray(LABELS > 1), "TIFF", compression="group4"), BITS),
    **{
        f"grey PNG of {depth} bits": (png_of_bits(LABELS & (2**depth - 1), depth), LABELS & (2**depth - 1))
        for depth in (1, 2, 4, 8)
    },
    **{
        f"palette PNG of {depth} bits": (png_of_bits(LABELS & (2**depth - 1), depth, 3), LABELS & (2**depth - 1))
        for depth in (1, 2, 4, 8)
    },
    "PGM of few values": (b"P5\n19 13\n3\n" + LABELS.tobytes(), LABELS),
    "PGM as text": (b"P2\n19 13\n200\n" + " ".join(map(str, (LABELS * 50).ravel())).encode() + b"\n", LABELS * 50),
    "grey with alpha": (packed(Image.merge("LA", [GREY, GREY]), "PNG"), LABELS),
    "16 bits PNG": (packed(Image.fromarray(DEEP), "PNG"), DEEP),
    "16 bits TIFF": (tiff(DEEP, compression="zlib"), DEEP),
}
REFUSED = {
    "RGB PNG": packed(GREY.convert("RGB"), "PNG"),
    "RGBA PNG": packed(GREY.convert("RGBA"), "PNG"),
    "RGB JPEG": packed(GREY.convert("RGB"), "JPEG"),
    "CMYK JPEG": packed(GREY.convert("CMYK"), "JPEG"),
    "WebP": packed(GREY, "WEBP", lossless=True),
    "bands": tiff(MANY, photometric="minisblack", planarconfig="contig"),
    "bands of 16 bits": tiff(MANY[..., :2].astype(np.uint16), photometric="minisblack", planarconfig="contig"),
}


@pytest.mark.parametrize("name", FILES)
def test_labels_are_the_values_in_the_file(name):
    file, expected = FILES[name]
    images = DecodeStage(channels="labels")(collate_encoded([file, file]))
    for image in images:
        assert image.shape == (1, *expected.shape)
        assert np.array_equal(image[0].numpy(), expected)
        assert image.numpy().dtype == expected.dtype


def test_grey_jpeg_is_decoded_as_it_is():
    file = packed(GREY.resize((64, 48)), "JPEG")
    with Image.open(io.BytesIO(file)) as image:
        assert np.array_equal(DecodeStage(channels="labels")(collate_encoded([file]))[0][0].numpy(), np.array(image))


@pytest.mark.parametrize("name", REFUSED)
def test_files_in_colour_are_refused_or_replaced(name):
    batch = [collate_encoded([FILES["palette PNG"][0], REFUSED[name]])]
    with pytest.raises(DecodeError, match=r"sample 1: it has \d channels of \w+, not the one of a grey image or palette"):
        list(StreamedLoader(batch, [DecodeStage(channels="labels")], device="cpu"))
    (images,) = StreamedLoader(batch, [DecodeStage(channels="labels", on_error="replace")], device="cpu")
    assert np.array_equal(images[1][0].numpy(), LABELS)


def test_labels_of_one_batch_have_one_type():
    with pytest.raises(DecodeError, match="1 channel of uint16, and the first image of the batch has 1 channel of uint8"):
        DecodeStage(channels="labels")(collate_encoded([FILES["grey PNG"][0], FILES["16 bits PNG"][0]]))


@pytest.mark.parametrize("option", [{"min_side": 8}, {"scale": "auto"}])
def test_labels_are_not_averaged(option):
    with pytest.raises(gpuaug.ArgumentError, match="must be left out with channels='labels'"):
        DecodeStage(channels="labels", **option)


def turned(image, orientation, form="PNG"):
    exif = Image.Exif()
    exif[274] = orientation
    return packed(image, form, exif=exif)


@on_each_device
def test_masks_from_files_follow_their_photographs(device):
    """Photographs have the labels as colours, of which the nearest pixel is compared."""
    photographs, masks = [], []
    for orientation, (height, width) in itertools.product((1, 3, 6), [(40, 60), (57, 33)]):
        labels = np.repeat(np.repeat(RNG.integers(0, 4, (-(-height // 8), -(-width // 8))), 8, 0), 8, 1)[:height, :width]
        photographs.append(turned(Image.fromarray(np.stack([labels * 60] * 3, -1).astype(np.uint8)), orientation))
        masks.append(turned(palette(labels.astype(np.uint8)), orientation))
    crop = gpuaug.fuse([v2.RandomHorizontalFlip(), v2.RandomCrop(24)], ragged=True)
    stages = [
        DecodeStage(on=0),
        DecodeStage(on=(1, 2), channels="labels"),
        TransformStage(lambda masks: list(masks), on=1),
        TransformStage(crop, on={0: "input", 1: "mask"}),
    ]
    samples = [*zip(photographs, masks, masks, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ((images, labels, others),) = StreamedLoader([collate_encoded(samples)], stages, device=device, seed=0)
    assert others.shapes.channels == 1
    expected = [(image[0] // 60).long() for image in images]
    assert torch.equal(torch.stack(list(labels))[:, 0].long(), torch.stack(expected))


def messages(samples, *stages):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(StreamedLoader([collate_encoded(samples)] * 2, stages, device="cpu"))
    return [str(warning.message) for warning in caught if issubclass(warning.category, GpuAugWarning)]


USED = TransformStage(lambda image, mask, data_keys: (image, mask), on={0: "input", 1: "mask"})
LUMA = r"Class indices are lost in \[(1|'mask')\], because channels=(1|3) converts palettes"


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", [*FILES])
@pytest.mark.every(3)
def test_masks_that_become_shades_of_grey_warn_once(name, channels):
    file, photograph = FILES[name][0], REFUSED["RGB JPEG"]
    if "16 bits" in name:
        return
    is_converted = any(word in name for word in ("palette", "bits", "of few", "as text")) and name != "grey PNG of 8 bits"
    decode = [DecodeStage(on=0), DecodeStage(on=1, channels=channels)]
    told = messages([(photograph, file)] * 2, *decode, USED)
    told += messages([{"mask": file}] * 2, DecodeStage(channels=channels))
    assert len(told) == (2 if is_converted else 0)
    assert all(re.match(LUMA, text) for text in told)
    assert not messages([(photograph, file)] * 2, *decode), "a member that is not a mask"


PHOTOGRAPH = Image.new("RGB", (19, 13), "red")
BOXES = {
    "tensor": torch.ones(1, 4),
    "list": [[1.0, 2.0, 3.0, 4.0]],
    "empty in the first sample": [],
}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.every(3)
def test_masks_and_boxes_that_exif_does_not_turn_warn_once(form, orientation):
    photographs = [turned(PHOTOGRAPH, 1, form), turned(PHOTOGRAPH, orientation, form)]
    mask, turned_mask = FILES["palette PNG"][0], turned(palette(LABELS), orientation)
    decode = [DecodeStage(on=0), DecodeStage(on=1, channels="labels")]
    expected = [f"EXIF turns sample 1 upright (orientation {orientation})"] * (1 < orientation < 5)  # the size is kept
    for stages in (decode, decode[::-1]):
        told = messages([(photograph, mask) for photograph in photographs], *stages)
        assert [text[text.index("EXIF") : text.index(", and does not")] for text in told] == expected
    assert not messages([(photographs[0], mask), (photographs[1], turned_mask)], *decode)
    bad = [DecodeStage(on=0), DecodeStage(on=1, channels="labels", on_error="replace")]
    assert not messages([(photographs[0], mask), (photographs[1], b"")], *bad), "a mask that cannot be decoded"
    as_stored = [DecodeStage(on=0, exif=False), decode[1]]
    assert not messages([(photograph, mask) for photograph in photographs], *as_stored)
    for name, boxes in BOXES.items():
        targets = [{"bbox": boxes}, {"bbox": torch.ones(1, 4) if name == "tensor" else [[1, 2, 3, 4]]}]
        samples = [*zip(photographs, targets, strict=True)]
        assert [text[: text.index(",")] for text in messages(samples, DecodeStage())] == ["bbox may not match the images"] * (
            orientation > 1
        )
        assert not messages(samples, DecodeStage(exif=False))
    assert not messages([*zip(photographs, [1, 2], strict=True)], DecodeStage()), "labels of classes"
