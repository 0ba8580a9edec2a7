"""Images decoded on the CPU, by simplejpeg and by PIL."""

import io
import warnings
from importlib.metadata import version

import numpy as np
import PIL
import pytest
from PIL import Image, ImageFile
from support.files.encoded import by_pil, encoded, mixed_files, room_of, smooth

from gpuaug import DecodeError, DecodeStage, collate_encoded, collate_ragged
from gpuaug.decode.decoders import cpu, turbojpeg
from gpuaug.decode.formats import imagecodecs, jpeg
from gpuaug.decode.layout import Layout, Options

DECODERS = ("simplejpeg", "PIL")
"""Decoders of JPEGs, the preferred one first. Each is tested as if those before it were not installed."""


def without(monkeypatch, *names):
    """Have libraries that decode look as if they were not installed."""
    for name in names:
        for module in (cpu, imagecodecs if name == "imagecodecs" else jpeg):
            monkeypatch.setattr(module, name, lambda: None)


@pytest.fixture(params=DECODERS)
def decoder(request, monkeypatch):
    without(monkeypatch, *DECODERS[: DECODERS.index(request.param)])
    if request.param != "PIL":
        pytest.importorskip(request.param)
    return request.param


def decoded(file, *, header=None, channels=3, min_side=None, exif=True):
    """One image (h, w, C), and why it cannot be decoded."""
    batch = collate_encoded([file])
    for name, value in (header or {}).items():
        batch.headers.table[name] = value
    layout = Layout(batch.headers, Options(channels, min_side, exif, 10**9), [cpu.Cpu()])
    room = room_of(layout, np.full(layout.length, 77, np.uint8), 0, 0)
    return room, cpu.decode(batch.file(0), layout, layout.infos[0], room)


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("exif", [True, False])
def test_pixels_are_those_of_pil(mode, exif):
    for file in mixed_files():
        if mode == "L" and b"Adobe" in file[:200]:
            continue  # of four channels, which have no luma in the file
        room, problem = decoded(file, channels=3 if mode == "RGB" else 1, exif=exif)
        assert not problem
        assert np.array_equal(room, by_pil(file, mode=mode, upright=exif))


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize(("min_side", "size"), [(32, (33, 66)), (17, (17, 33)), (8, (9, 17)), (66, (65, 131))])
def test_a_jpeg_is_made_smaller_while_it_is_decoded(orientation, min_side, size):
    file = encoded(131, 65, orientation=orientation)
    room, problem = decoded(file, min_side=min_side)
    assert not problem
    assert room.shape[:2] == (size if orientation == 1 else size[::-1])
    whole = by_pil(file)
    assert abs(room.mean() - whole.mean()) < 3


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("sides", [(600, 4), (4, 600), (1, 1), (7, 9), (601, 1)])
def test_a_narrow_jpeg_is_made_smaller(sides, mode):
    room, problem = decoded(encoded(*sides, mode=mode), min_side=1)
    assert not problem
    assert room.shape[:2] == tuple(-(-side // 8) for side in reversed(sides))


@pytest.mark.usefixtures("decoder")
def test_a_file_other_than_its_header_is_a_problem():
    file = encoded(40, 24)
    _, problem = decoded(file, header={"height": 25, "width": 41})
    assert problem == "it decodes to 40x24 pixels, but its header says 41x25"
    assert decoded(file, header={"height": 23})[1] == "it decodes to 40x24 pixels, but its header says 40x23"


@pytest.mark.usefixtures("decoder")
def test_a_decoder_that_finds_other_channels_than_the_header_is_not_asked():
    """simplejpeg would convert CMYK in its own way."""
    file = encoded(40, 24, mode="CMYK", seed=3)
    room, problem = decoded(file, header={"channels": 3})
    assert not problem
    assert np.array_equal(room, by_pil(file))


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize(("channels", "mode"), [(3, "RGB"), (1, "L")])
@pytest.mark.parametrize("min_side", [None, 16])
def test_a_jpeg_of_several_pictures_is_its_first(channels, mode, min_side):
    """As phones write them. PIL has another format for these, which it would decode otherwise."""
    packed = io.BytesIO()
    smooth(131, 65).save(packed, "MPO", save_all=True, append_images=[smooth(131, 65, seed=1)])
    with Image.open(packed) as several:
        assert (several.format, several.n_frames) == ("MPO", 2)
    file = packed.getvalue()
    index = file.index(b"MPF\0") - 4  # the segment that says where the pictures are
    alone = file[:index] + file[index + 2 + int.from_bytes(file[index + 2 : index + 4], "big") : file.index(b"\xff\xd8", 2)]
    room, problem = decoded(file, channels=channels, min_side=min_side)
    assert not problem
    assert np.array_equal(room, decoded(alone, channels=channels, min_side=min_side)[0])
    if min_side is None:
        assert np.array_equal(room, by_pil(alone, mode=mode))


def test_a_file_is_decoded_as_the_format_of_its_header():
    """PIL tries formats that have no signature before some that have one."""
    file = bytearray(encoded(40, 30, "WEBP", lossless=True, exact=True))
    chunk = b"JUNK" + (4096).to_bytes(4, "little") + bytes(4096)
    file += chunk
    file[4:8] = (len(file) - 8).to_bytes(4, "little")
    file[2048:2052] = b"PCD_"
    with Image.open(io.BytesIO(file)) as image:
        assert image.format == "PCD"
    room, problem = decoded(bytes(file))
    assert not problem
    assert np.array_equal(room, by_pil(encoded(40, 30, "WEBP", lossless=True, exact=True)))


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "BMP"])
def test_the_stage_alone_limits_how_many_pixels_an_image_has(form, monkeypatch):
    file = encoded(40, 30, form)
    for most in (30 * 30, 30 * 10):  # PIL warns of more, and refuses twice as many
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
        with warnings.catch_warnings(action="error"):
            assert not decoded(file)[1]


def scans_of(file):
    return [at for at in range(len(file)) if file[at : at + 2] == b"\xff\xda"]


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("orientation", [1, 6])
def test_an_error_behind_a_warning_is_a_problem(orientation):
    """Unless strict, simplejpeg takes it for a warning, and leaves the memory as it was."""
    file = bytearray(encoded(64, 48, progressive=True, orientation=orientation))
    _, second, third, *_ = scans_of(file)
    file[third + 6] = 0x77  # Huffman tables that there are not
    file[second:second] = b"junk"
    assert decoded(bytes(file))[1].startswith(("OSError: ", "ValueError: "))


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("min_side", [None, 17])
def test_a_warning_is_no_reason_to_refuse_a_file(channels, min_side):
    for options in ({}, {"progressive": True}):
        whole = encoded(131, 65, orientation=6, **options)
        table, scan = whole.find(b"\xff\xdb"), scans_of(whole)[-1]
        for file in (whole + b"junk", whole[:table] + b"junk" + whole[table:], whole[:scan] + b"junk" + whole[scan:]):
            room, problem = decoded(file, channels=channels, min_side=min_side)
            assert not problem
            assert np.array_equal(room, decoded(whole, channels=channels, min_side=min_side)[0])


@pytest.mark.parametrize("missing", [(), ("simplejpeg",), ("imagecodecs",), ("simplejpeg", "imagecodecs")])
def test_versions_are_of_all_that_decode(missing, monkeypatch):
    """PIL decodes palettes, CMYK JPEGs and files that others refuse, so its version matters beside theirs."""
    without(monkeypatch, *missing)
    installed = [name for name in ("simplejpeg", "imagecodecs") if getattr(cpu, name)() is not None]
    parts = [*(f"{name} {version(name)}" for name in installed), f"PIL {PIL.__version__}", turbojpeg.version()]
    assert cpu.Cpu().version == ", ".join(parts)
    monkeypatch.setattr(turbojpeg, "library", lambda: None)
    assert cpu.Cpu().version == ", ".join(parts[:-1])


@pytest.mark.parametrize("decoder", DECODERS[:-1], indirect=True)
@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("orientation", [1, 6])
def test_pil_is_not_asked_for_a_jpeg_that_a_preferred_decoder_takes(monkeypatch, orientation):
    monkeypatch.setattr(cpu, "_decode_with_pil", None)
    for options in ({}, {"progressive": True}, {"mode": "L"}, {"subsampling": 1}):
        for min_side in (None, 12):
            assert not decoded(encoded(40, 24, orientation=orientation, **options), min_side=min_side)[1]


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_decoder_may_return_an_array_of_its_own(monkeypatch, orientation):
    pytest.importorskip("simplejpeg")
    file = encoded(40, 24, orientation=orientation)
    other = jpeg.FORMAT._replace(decode=lambda file, *_: by_pil(bytes(file), upright=False))
    monkeypatch.setattr(cpu, "format_of", lambda _: other)
    room, problem = decoded(file)
    assert not problem
    assert np.array_equal(room, by_pil(file))


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"progressive": True}, {"mode": "L"}, {"mode": "CMYK"}], ids=str)
@pytest.mark.parametrize("scale", [2, 4, 8])
def test_smaller_images_are_those_of_a_draft(options, scale):
    width, height = 501, 377  # no multiples of a scale
    file = encoded(width, height, **options)
    (image,) = DecodeStage(min_side=-(-height // scale))(collate_encoded([file]), "cpu")
    with Image.open(io.BytesIO(file)) as opened:
        opened.draft(opened.mode, (width // scale, height // scale))
        wanted = np.asarray(opened.convert("RGB"))
    assert wanted.shape == (-(-height // scale), -(-width // scale), 3)
    assert np.array_equal(image.permute(1, 2, 0).numpy(), wanted)


@pytest.mark.parametrize("load_truncated", [False, True])
@pytest.mark.parametrize("form", ["PNG", "GIF", "BMP", "TIFF", "JPEG", "progressive JPEG"])
def test_pils_flag_for_truncated_files_has_the_documented_effect(monkeypatch, form, load_truncated):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", load_truncated)
    options = {"progressive": True} if form.startswith("progressive") else {}
    file = encoded(48, 32, form.split()[-1], **options)
    truncated = file[: len(file) * 7 // 10]
    if form.endswith("JPEG"):
        with pytest.raises(DecodeError, match="it ends before its end marker"):
            DecodeStage(backend="cpu")(collate_encoded([truncated]), "cpu")
    elif load_truncated:
        (image,) = DecodeStage(backend="cpu")(collate_encoded([truncated]), "cpu")
        assert np.array_equal(image.permute(1, 2, 0), by_pil(truncated))
    else:
        with pytest.raises(DecodeError, match="truncated"):
            DecodeStage(backend="cpu")(collate_encoded([truncated]), "cpu")


def test_grey_of_jpegs_is_their_luma_and_of_other_formats_pils_conversion():
    for form in ("JPEG", "PNG", "BMP", "TIFF", "WEBP"):
        file = encoded(48, 32, form)
        colours = Image.open(io.BytesIO(file)).convert("RGB")
        converted = np.asarray(colours.convert("L"))
        (image,) = DecodeStage(backend="cpu", channels=1)(collate_encoded([file]), "cpu")
        (collated,) = collate_ragged([colours], channels=1, convert=True)
        assert np.array_equal(collated[0], converted)
        assert np.array_equal(image[0], by_pil(file, mode="L")[..., 0] if form == "JPEG" else converted)
        assert np.array_equal(image[0], converted) == (form != "JPEG")
