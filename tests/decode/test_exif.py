"""Orientations as PIL reads them, from every place and type of entry, and from EXIF that is damaged."""

import io
import itertools
import struct
import zlib

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.files import exif_files
from support.files.exif_files import TYPES, chunk, exif, xmp

from gpuaug import DecodeStage, collate_encoded
from gpuaug.decode.formats import exif as reader
from gpuaug.decode.formats import png
from gpuaug.decode.headers import parse

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")  # of PIL, about what it finds
    for text in ("Possibly corrupt EXIF", "Corrupt EXIF", "Metadata Warning", "Tag data", "Truncated File")
]

VALUES = range(11)
UNKNOWN = (0, 14, 200)
"""Types that there are not."""


def by_pil(data, *, upright):
    image = PIL.Image.open(io.BytesIO(data))
    return np.asarray((PIL.ImageOps.exif_transpose(image) if upright else image).convert("RGB"))


def assert_equal_to_pil(files):
    """The files of a dict are upright as by PIL. Returns how many of them are turned."""
    decoded = DecodeStage(backend="cpu")(collate_encoded(list(files.values())), "cpu")
    for (name, data), image in zip(files.items(), decoded, strict=True):
        assert np.array_equal(image.permute(1, 2, 0).numpy(), by_pil(data, upright=True)), name
    return sum(parse(data).orientation > 1 for data in files.values())


def assert_as_stored(files):
    decoded = DecodeStage(backend="cpu", exif=False)(collate_encoded(list(files.values())), "cpu")
    for (name, data), image in zip(files.items(), decoded, strict=True):
        assert np.array_equal(image.permute(1, 2, 0).numpy(), by_pil(data, upright=False)), name


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "avif"])
def test_every_place_and_type_of_an_orientation(kind):
    places = getattr(exif_files, f"in_{kind}")
    files = {}
    for number, (form, order, value) in enumerate(itertools.product((*TYPES, *UNKNOWN), "<>", VALUES)):
        if kind in ("webp", "avif") and (value > 8 or form not in (3, 4)):
            continue  # slower to make, and their EXIF is read by the same function
        if form not in (3, 4) and value not in (1, 6):
            continue
        made = list(places(exif(value, form, order)).items())
        if (form, order) not in ((3, "<"), (4, ">")) or value not in (0, 6, 8, 9):
            made = [made[0], made[number % len(made)]]  # EXIF of all places is read by one function
        for place, data in made:
            files[f"{place}: {value} of type {form}, {order}"] = data
    if not files:
        pytest.skip(f"PIL without {kind}")
    assert assert_equal_to_pil(files) > len(files) // 4
    assert_as_stored(files)


@pytest.mark.parametrize("order", "<>")
def test_tiffs_are_turned_once_or_not_at_all(order):
    files = {
        f"{place}: {value} of type {form}": data
        for form, value in itertools.product(sorted(set(TYPES) - {2, 7, 16}), VALUES)
        if value in (0, 1, 6, 8, 9) or form == 3
        for place, data in exif_files.in_tiff(value, form, order, None if form in (3, 5) else [""]).items()
    }
    assert assert_equal_to_pil(files) > len(files) // 3
    stored = exif_files.noise(0, 5, 9, 3)
    decoded = DecodeStage(backend="cpu", exif=False)(collate_encoded(list(files.values())), "cpu")
    for name, image in zip(files, decoded, strict=True):
        assert np.array_equal(image.permute(1, 2, 0).numpy(), stored), name
    for data in files.values():
        header = parse(data)
        assert (header.height, header.width) == stored.shape[:2]


def test_an_orientation_in_xmp_counts_where_exif_has_none():
    files = {f"{place}: {value}": data for value in VALUES for place, data in exif_files.in_xmp(value).items()}
    assert_equal_to_pil(files)
    turned = {place for place, data in exif_files.in_xmp(3).items() if parse(data).orientation == 3}
    assert turned == {place for place in exif_files.in_xmp(3) if " with" not in place or place.endswith("without")}


def test_what_is_damaged_in_a_png_turns_nothing():
    whole = exif_files.encoded("PNG", 5, 9)
    name = b"Raw profile type exif\0"
    for text in (
        chunk(b"eXIf", exif(6)[:20]),
        chunk(b"eXIf", b""),
        chunk(b"tEXt", name + b"\nexif\n 4\nno digits\n"),
        chunk(b"tEXt", name + b"\nexif\n"),
        chunk(b"tEXt", name[:-1]),
        chunk(b"zTXt", name + b"\0no zlib"),
        chunk(b"iTXt", name + b"\0\0"),
        chunk(b"iTXt", name + b"\1\0\0\0no zlib"),
        chunk(b"\0\0\0\0", b"") + chunk(b"eXIf", exif(6)),  # PIL stops at a name that is none
    ):
        assert parse(whole[:-12] + text + whole[-12:]).orientation == 1
    assert parse(whole[:-12] + chunk(b"eXIf", exif(6))).orientation == 6  # without an end
    assert parse(whole + chunk(b"eXIf", exif(6))).orientation == 1  # behind the end


@pytest.mark.parametrize("damaged", [b"Exif\0\0", b"no TIFF structure", exif(6)[:9], b"II+\0" + bytes(20)])
def test_damaged_exif_is_no_reason_to_refuse_a_file(damaged):
    files = {"WebP": exif_files.encoded("WEBP", 5, 9, exif=damaged), "PNG": exif_files.encoded("PNG", 5, 9, exif=damaged)}
    files["JPEG"] = exif_files.app1(b"Exif\0\0" + damaged)
    for upright in (True, False):
        decoded = DecodeStage(backend="cpu", exif=upright)(collate_encoded(list(files.values())), "cpu")
        for (name, data), image in zip(files.items(), decoded, strict=True):
            assert np.array_equal(image.permute(1, 2, 0).numpy(), by_pil(data, upright=False)), name


@pytest.mark.parametrize("form", [1, 2, 7])
def test_an_orientation_that_is_no_number_and_behind_the_end_is_none(form):
    """The other tags of a TIFF are read."""
    data = bytearray(exif_files.encoded("TIFF", 5, 9))
    (directory,) = struct.unpack_from("<I", data, 4)
    (count,) = struct.unpack_from("<H", data, directory)
    entry = struct.pack("<HHII", 274, form, 20, 10**6)
    entries = [data[start : start + 12] for start in range(directory + 2, directory + 2 + 12 * count, 12)]
    struct.pack_into("<I", data, 4, len(data))
    data += struct.pack("<H", count + 1) + b"".join(sorted([*entries, entry], key=lambda each: each[1::-1])) + bytes(4)
    assert parse(bytes(data))[:2] == (5, 9)
    assert reader.orientation(b"II*\0" + struct.pack("<IH", 8, 1) + entry + bytes(4), xmp(6)) == 1


def test_exif_between_the_frames_of_an_animation_is_of_no_frame_that_is_decoded():
    frames = [PIL.Image.new("RGB", (9, 5), colour) for colour in ("red", "blue")]
    packed = io.BytesIO()
    frames[0].save(packed, "PNG", save_all=True, append_images=frames[1:])
    data = packed.getvalue()
    second = data.index(b"fcTL", data.index(b"IDAT")) - 4
    files = {
        "before the second": data[:second] + chunk(b"eXIf", exif(6)) + data[second:],
        "behind the second": data[:-12] + chunk(b"eXIf", exif(6)) + data[-12:],
    }
    assert assert_equal_to_pil(files) == 1


def test_texts_are_decompressed_as_far_as_pil_does():
    whole = exif_files.encoded("PNG", 5, 9)
    bomb = chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(bytes(2**22)))
    _, texts, _ = png.read_metadata(memoryview(whole[:33] + bomb + whole[33:]))
    assert len(texts) == 0
    assert len(png._text(b"zTXt", bomb[8:-4])) == 2**20


ENTRIES = st.tuples(
    st.sampled_from([271, 274, 274, 274, 306]),
    st.sampled_from(sorted(TYPES)),
    st.integers(1, 3),
    st.integers(0, 70) | st.sampled_from([6, 6 << 16]),
)


@st.composite
def structures(draw):
    """EXIF whose entries have values of any type, in the entry or behind the directory."""
    order = draw(st.sampled_from("<>"))
    data = draw(st.sampled_from([b"II*\0", b"II\0*"] if order == "<" else [b"MM\0*", b"MM*\0"]))
    entries = draw(st.lists(ENTRIES, max_size=4))
    data += struct.pack(order + "IH", 8, len(entries))
    behind = 10 + 12 * len(entries) + 4
    for tag, form, count, value in entries:
        fits = struct.calcsize(TYPES[form]) * count * (2 if form in (5, 10) else 1) <= 4
        data += struct.pack(order + "HHII", tag, form, count, value if fits else behind)
    data += bytes(4) + struct.pack(order + "6I", *draw(st.lists(st.sampled_from([0, 1, 6, 8]), min_size=6, max_size=6)))
    return b"Exif\0\0" * draw(st.integers(0, 2)) + data


@given(structures() | st.just(b""), st.sampled_from([b"", xmp(6), xmp(0), b"tiff:Orientation", xmp(12)]))
@settings(max_examples=125)
def test_any_whole_exif_is_read_as_by_pil(data, metadata):
    image = PIL.Image.new("L", (1, 1))
    image.info = {"exif": data, "xmp": metadata}
    try:
        value = image.getexif().get(274, 1)
    except Exception:  # of a division by 0; without it PIL turns nothing
        value = 1
    assert reader.orientation(data, metadata) == (value if value in range(1, 9) else 1)


@given(structures() | st.binary(max_size=60), st.integers(0, 100), st.binary(max_size=2))
@settings(max_examples=125)
def test_any_damaged_exif_has_an_orientation(data, position, inserted):
    damaged = data[:position] + inserted + data[position + 1 :]
    assert reader.orientation(damaged) in range(1, 9)
