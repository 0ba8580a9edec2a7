"""A damaged file decodes to an image of its header's size, or is a ``DecodeError``; others of its batch stay as they are."""

import functools
import math
from unittest import mock

import kornia.augmentation as K
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from support.comparison.values import assert_values
from support.files import nvjpeg_double
from support.files.damaged_files import damaged_files
from support.files.encoded import encoded
from support.files.guarded_simplejpeg import guarded
from support.files.hostile_files import MAKERS, hostile_files
from support.public.fuzzing import bounded, cases, outcome

import gpuaug
from gpuaug.decode import decoder
from gpuaug.decode.headers import parse
from gpuaug.decode.limits import MAX_SEGMENTS

pytestmark = [pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]  # of PIL, about what it finds in a file

MAX_PIXELS = 10**6
GOOD = [encoded(48, 40, seed=1), encoded(40, 52, "PNG", seed=2), encoded(56, 48, seed=3, progressive=True)]
OPTIONS = st.fixed_dictionaries(
    {"channels": st.sampled_from([3, 1]), "min_side": st.none() | st.just(10), "exif": st.booleans()}
)


def decoded(files, poison, device, **options):
    """The images of a batch, in memory that held something else: what was not written would show."""
    decode = gpuaug.DecodeStage(max_pixels=MAX_PIXELS, **options)
    with mock.patch.object(decoder, "POISON", poison), guarded():
        return [image.cpu() for image in decode(gpuaug.collate_encoded(files), device)]


@functools.cache
def good_images(device, **options):
    return decoded(GOOD, 0xAA, device, **options)


def recorded(seconds, grown):
    """Count files by the power of ten of their time, and of two of their memory, in ``--hypothesis-show-statistics``."""
    event("seconds", f"< {10 ** max(math.ceil(math.log10(seconds + 1e-9)), -2)}")
    event("memory", f"< {2 ** max((grown >> 20).bit_length(), 4)} MiB")


def replaced(damaged, device, **options):
    """The images of a batch in which a good file stands before each damaged one, which are replaced where they must be."""
    files = [file for index, each in enumerate(damaged) for file in (GOOD[index % len(GOOD)], each)]
    made = decoded(files, 0x00, device, on_error="replace", **options)
    again = decoded(files, 0xFF, device, on_error="replace", **options)
    for one, other in zip(made, again, strict=True):
        assert_values(one, other, about="some pixels were not written")
    table, wanted = gpuaug.collate_encoded(files).headers.table, good_images(device, **options)
    for index in range(0, len(files), 2):
        assert_values(made[index], wanted[index // 2 % len(GOOD)], about="a neighbour's pixels")
        stored = int(table["height"][index + 1]), int(table["width"][index + 1])
        if options["min_side"] is None and not torch.equal(made[index + 1], made[index]):
            assert tuple(made[index + 1].shape[1:]) in (stored, stored[::-1])
    return made[1::2]


@cases(30)
@given(damaged_files(), OPTIONS)
def test_a_damaged_file_decodes_or_is_a_decode_error(file, options):
    with bounded(recorded, MAX_PIXELS):
        (image,) = replaced([file], "cpu", backend="cpu", **options)
    made = outcome(decoded, [GOOD[0], file, GOOD[1]], 0x55, "cpu", backend="cpu", **options)
    event(type(made).__name__)
    if isinstance(made, gpuaug.DecodeError):
        assert "because of sample 1: " in str(made)
        assert_values(image, good_images("cpu", backend="cpu", **options)[0])
    else:
        assert_values(image, made[1])


@cases(10)
@given(st.lists(damaged_files(), min_size=1, max_size=8), OPTIONS)
def test_damaged_files_between_those_of_engines_leave_them_as_they_are(files, options):
    with pytest.MonkeyPatch.context() as patch:
        nvjpeg_double.use(patch)
        replaced(files, "cpu", backend="auto", **options)


AUGMENT = gpuaug.fuse(K.RandomResizedCrop((12, 12), scale=(0.05, 0.5)), ragged=True)


def cropped(files, poison, device, backend):
    """Crops of a batch whose images are decoded in part, and whether any image was."""
    decode = gpuaug.DecodeStage(max_pixels=MAX_PIXELS, backend=backend, on_error="replace")
    with mock.patch.object(decoder, "POISON", poison), guarded():
        with gpuaug.StreamedLoader([gpuaug.collate_encoded(files)], [decode, AUGMENT], device=device, seed=0) as loader:
            (images,) = [batch.cpu() for batch in loader]
        return images, loader.stats().undecoded_pixels > 0


def check_windows(damaged, device, backend):
    """A good file stands before each damaged one, and its crop depends on nothing else; no crop reads unwritten memory."""
    files = [file for index, each in enumerate(damaged) for file in (GOOD[index % len(GOOD)], each)]
    made, some = cropped(files, 0x00, device, backend)
    assert_values(cropped(files, 0xFF, device, backend)[0], made, about="some pixels were not written")
    wanted, _ = cropped([GOOD[index // 2 % len(GOOD)] for index in range(len(files))], 0xAA, device, backend)
    # On a GPU, a batch with decoded windows and one without run different kernels, which round coordinates differently.
    assert_values(made[::2], wanted[::2], atol=0 if device == "cpu" else 1e-6, about="a neighbour's pixels")
    assert some


@cases(10)
@given(st.lists(damaged_files(), min_size=1, max_size=8), st.sampled_from(["cpu", "auto"]))
def test_damaged_files_leave_the_windows_of_others_as_they_are(files, backend):
    with pytest.MonkeyPatch.context() as patch:
        nvjpeg_double.use(patch)
        check_windows(files, "cpu", backend)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["engines", "hybrid"])
@cases(60)
@given(st.lists(damaged_files(), min_size=1, max_size=8))
def test_damaged_files_leave_the_windows_of_others_on_a_gpu_as_they_are(backend, files):
    check_windows(files, "cuda", backend)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["engines", "hybrid"])
@cases(100)
@given(st.lists(damaged_files(), min_size=1, max_size=8), OPTIONS)
def test_damaged_files_leave_those_of_a_gpu_as_they_are(backend, files, options):
    replaced(files, "cuda", backend=backend, **options)


PASSED_OVER = {
    *("JPEG: padding between scans", "JPEG: restart markers between scans", "JPEG: end of a scan between scans"),
    *("PNG: pixels in front", "PNG: pixels behind", "PNG: long text", "PNG: animated"),
    *("GIF: application data", "GIF: long application data", "GIF: frames", "WebP: frames", "WebP: long EXIF"),
    *(f"netpbm: {kind}, comment" for kind in range(1, 7)),
    *(f"netpbm: {kind}, comments" for kind in (4, 5, 6)),
    *("netpbm: digits", "netpbm: spaces", "netpbm: split number", "netpbm: slow maximum", "BMP: pairs"),
    *("TIFF: loop", "TIFF: loop of overviews", "TIFF: pages", "TIFF: overviews", "TIFF: signed width", "TIFF: large strips"),
    *("JPEG: baseline scans", "AVIF: boxes", "TIFF: JPEG of many scans"),
}
"""Files of thousands of pieces that are not refused by their header: libraries pass over each piece in nanoseconds, stop before
them, or have a limit of their own."""


@pytest.mark.parametrize("channels", [3, None])
def test_files_of_thousands_of_pieces_are_refused_or_decoded_in_bounded_time_and_memory(channels):
    taken, read = {}, set()
    for name, data in hostile_files(2 * MAX_SEGMENTS).items():
        with bounded(lambda *measured, name=name: taken.update({name: measured}), MAX_PIXELS):
            header = parse(data)
            outcome(decoded, [data], 0, "cpu", backend="cpu", channels=channels)
        if not header.problem and header.height * header.width < 13000**2:
            read.add(name)
    assert read <= PASSED_OVER
    assert len(taken) > len(read) + 50


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKERS)
def test_large_images_take_time_and_memory_in_proportion_to_their_size(kind):
    for data in MAKERS[kind](2**15).values():
        with bounded(lambda *_: None, 13000**2):
            outcome(gpuaug.DecodeStage(threads=1), gpuaug.collate_encoded([data]), "cpu")
