"""Where images go: sizes, factors, places that do not overlap, who decodes, and what replaces a bad one."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.files.encoded import room_of
from support.files.nvjpeg_double import ON_CARD

from gpuaug.core.encoded import HEADER, SAMPLE_TYPES, Format, Headers
from gpuaug.core.ragged import Windows, buffer_length
from gpuaug.decode.decoders.engines import MAX_ENGINE_SIDE
from gpuaug.decode.layout import Layout, Options, rotated_upright, source_indices

OPTIONS = Options(channels=3, min_side=None, exif=True, max_pixels=10**9)


def headers(*sizes, form=Format.JPEG, orientation=1, sampling=10):
    """Of images of these heights and widths."""
    table = np.zeros(len(sizes), HEADER)
    table["height"], table["width"] = np.array(sizes).reshape(-1, 2).T
    table["format"], table["orientation"], table["sampling"], table["channels"] = form, orientation, sampling, 3
    return Headers(table, [""] * len(sizes), {})


SIZES = st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), min_size=1, max_size=8)


@given(st.integers(0, 2**34))
def test_a_slab_is_at_least_as_long_and_not_much_longer(length):
    assert max(length, 1) <= buffer_length(length) <= max(length, 1) * 1.126 + 4096
    assert buffer_length(length) % 4096 == 0


@given(st.integers(1, 2**34), st.integers(1, 2**34))
def test_slabs_grow_with_what_is_asked_for(one, other):
    assert (buffer_length(one) <= buffer_length(other)) or one > other


def test_batches_of_about_one_size_have_slabs_of_few_lengths():
    assert len({buffer_length(length) for length in range(10**8, 2 * 10**8, 10**5)}) <= 8


def test_slabs_of_growing_batches_are_together_at_most_nine_times_the_last():
    lengths = {buffer_length(int(10**6 * 1.001**number)) for number in range(6000)}
    assert max(lengths) > 400e6
    assert sum(lengths) <= 9 * max(lengths) + 4096 * len(lengths)


@given(st.integers(1, 20).flatmap(lambda count: st.tuples(st.just(count), st.sets(st.integers(0, count - 1)))))
def test_a_bad_image_is_replaced_by_the_nearest_good_one_before_it(drawn):
    count, bad = drawn
    if len(bad) == count:
        return
    wanted = []
    for index in range(count):
        at = index
        while at in bad:
            at = (at - 1) % count
        wanted.append(at)
    assert source_indices(count, bad).tolist() == wanted


@given(SIZES, st.integers(1, 200), st.sampled_from([Format.JPEG, Format.OTHER, Format.LOSSLESS_JPEG]))
def test_no_factor_is_too_large_nor_could_be_doubled(sizes, min_side, form):
    layout = Layout(headers(*sizes, form=form), Options(3, min_side, exif=True, max_pixels=10**9), ON_CARD)
    if form is not Format.JPEG:
        assert (layout.scales == 1).all()
        return
    for (height, width), scale, stored in zip(layout.shapes.sizes.tolist(), layout.scales.tolist(), sizes, strict=True):
        assert scale == 1 or min(height, width) >= min_side
        assert scale == 8 or -(-min(stored) // (2 * scale)) < min_side


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_orientation_above_four_exchanges_the_sides(orientation):
    given = headers((20, 30), orientation=orientation)
    upright = Layout(given, OPTIONS, ON_CARD[1:])
    assert upright.shapes.sizes.tolist() == [[30, 20] if orientation > 4 else [20, 30]]
    stored = Layout(given, Options(3, None, exif=False, max_pixels=10**9), ON_CARD)
    assert stored.shapes.sizes.tolist() == [[20, 30]]
    assert not stored.needs_postprocessing.any()
    image = torch.arange(6).view(2, 3, 1)
    assert tuple(rotated_upright(image, orientation).shape) == ((3, 2, 1) if orientation > 4 else (2, 3, 1))


@given(SIZES, st.sampled_from([1, 3]))
def test_images_lie_behind_one_another(sizes, channels):
    layout = Layout(headers(*sizes), Options(channels, None, exif=True, max_pixels=10**9), ON_CARD[1:])
    buffer = np.zeros(layout.length, np.uint8)
    for index in range(len(sizes)):
        room = room_of(layout, buffer, index, int(layout.starts[index]))
        assert room.shape == (*sizes[index], channels)
        assert not room.any(), "it overlaps with one before it"
        room[:] = index + 1
    assert buffer.all()
    assert layout.places()[:, 1:].tolist() == [list(size) for size in sizes]
    assert not np.diff(buffer.astype(int)).clip(max=0).any()


@pytest.mark.parametrize(
    ("how", "taken"),
    [
        ({}, True),
        ({"form": Format.OTHER_JPEG}, False),
        ({"form": Format.OTHER}, False),
        ({"form": Format.LOSSLESS_JPEG}, False),
        ({"sampling": 0}, False),
        ({"sampling": 5}, True),
        ({"sampling": 4 * 4 + 1}, False),
    ],
)
def test_engines_are_given_what_they_take(how, taken):
    assert Layout(headers((20, 30), **how), OPTIONS, ON_CARD).decoders.tolist() == [not taken]
    assert Layout(headers((20, 30), **how), OPTIONS, ON_CARD[1:]).decoders.tolist() == [0]


def test_engines_are_given_no_side_that_is_too_long():
    given = headers((MAX_ENGINE_SIDE, 1), (MAX_ENGINE_SIDE + 1, 1), (1, MAX_ENGINE_SIDE + 1))
    assert Layout(given, OPTIONS, ON_CARD).decoders.tolist() == [0, 1, 1]


def test_memory_of_its_own_is_for_what_is_made_smaller_or_turned():
    table = headers((20, 30), (64, 64), (20, 30))
    table.table["orientation"][2] = 3
    layout = Layout(table, Options(3, 32, exif=True, max_pixels=10**9), ON_CARD)
    assert layout.needs_postprocessing.tolist() == [False, True, True]
    assert layout.raw_starts.tolist()[1:] == [0, 64 * 64 * 3]
    assert layout.raw_length == (64 * 64 + 20 * 30) * 3


def test_headers_of_a_replaced_image_are_those_of_the_good_one():
    layout = Layout(headers((20, 30), (0, 0), (10, 10)), OPTIONS, ON_CARD, undecodable={1})
    assert layout.sources.tolist() == [0, 0, 2]
    assert layout.shapes.sizes.tolist() == [[20, 30], [20, 30], [10, 10]]


@pytest.mark.parametrize(("channels", "most"), [(3, 3 * 10 * 20), (1, 10 * 20), (None, 2 * 13 * 10 * 20)])
def test_bytes_of_all_bands_are_limited(channels, most):
    given = headers((10, 20))
    given.table["stored_channels"], given.table["type"] = 13, SAMPLE_TYPES.index("uint16")
    options = {"channels": channels, "min_side": None, "exif": True, "max_pixels": 2**62}
    assert Layout.problems(given, Options(**options, max_bytes=most)) == {}
    reason = f"its {most} bytes after decoding are more than max_bytes={most - 1}"
    assert Layout.problems(given, Options(**options, max_bytes=most - 1)) == {0: reason}
    given.table["height"] = given.table["width"] = 2**31 - 1  # the product exceeds 64 bits
    assert Layout.problems(given, Options(**options)).keys() == {0}


@given(SIZES, st.sampled_from([1, 3]), st.data())
def test_places_of_windows_count_from_the_first_pixel_of_the_image(sizes, channels, data):
    windows = []
    for height, width in sizes:
        top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
        windows.append((top, left, data.draw(st.integers(1, height - top)), data.draw(st.integers(1, width - left))))
    options = Options(channels, None, exif=True, max_pixels=10**9)
    layout = Layout(headers(*sizes), options, ON_CARD, windows=lambda shapes: Windows(np.array(windows), (1, 1)))
    assert layout.shapes.sizes.tolist() == [list(size) for size in sizes]
    assert layout.length == layout.shapes.num_elements == sum(height * width for *_, height, width in windows) * channels
    assert layout.undecoded_pixels == sum(height * width for height, width in sizes) - layout.length // channels
    buffer = np.arange(layout.length)
    for index, ((top, left, height, width), place) in enumerate(zip(windows, layout.places().tolist(), strict=True)):
        first, *size, pitch = place
        assert tuple(size) == sizes[index]
        y, x = np.mgrid[top : top + height, left : left + width]
        elements = first + (y * pitch + x)[..., None] * channels + np.arange(channels)
        room = room_of(layout, buffer, index, int(layout.starts[index]))
        assert np.array_equal(buffer[elements], room)
        assert layout.card_windows(np.array([index])).tolist() == [[top, left, height, width]]


def test_images_that_the_card_turns_or_makes_smaller_are_decoded_whole():
    given = headers((20, 30), (20, 30), (20, 30))
    given.table["orientation"][1] = 6
    given.table["format"][2] = Format.OTHER
    windows = np.array([[1, 2, 3, 4]] * 3)
    layout = Layout(given, OPTIONS, ON_CARD, windows=lambda shapes: Windows(windows, (1, 1)))
    assert layout.windows.tolist() == [[1, 2, 3, 4], [0, 0, 30, 20], [1, 2, 3, 4]]
    assert layout.card_windows(np.arange(2)).tolist() == [[1, 2, 3, 4], [0, 0, 20, 30]]
    smaller = Layout(
        given, Options(3, 10, exif=True, max_pixels=10**9), ON_CARD, windows=lambda shapes: Windows(windows, (1, 1))
    )
    assert smaller.windows.tolist() == [[0, 0, 10, 15], [0, 0, 15, 10], [1, 2, 3, 4]]


def test_decoders_that_decode_no_windows_decode_whole_images(monkeypatch):
    monkeypatch.setattr(ON_CARD[0], "decodes_windows", False)
    given = headers((20, 30), (20, 30))
    given.table["format"][1] = Format.OTHER
    layout = Layout(given, OPTIONS, ON_CARD, windows=lambda shapes: Windows(np.array([[1, 2, 3, 4]] * 2), (1, 1)))
    assert layout.windows.tolist() == [[0, 0, 20, 30], [1, 2, 3, 4]]
