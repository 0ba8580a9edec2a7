"""``on`` and ``into`` that do not fit the batch, and errors that name what would."""

import dataclasses

import pytest
import torch
from support.batches.containers import Frozen, Pair, Record, Slots

from gpuaug import ArgumentError, SelectionError
from gpuaug.stages.selection import Selection

TENSOR, PAIR, FIELDS = torch.zeros(1), (1, 2), {"images": 1, "labels": 2}

DOES_NOT_FIT = [
    (FIELDS, ..., ..., "on must be passed for a batch that is a dict, got no on"),
    (Pair(1, 2), ..., ..., "on must be passed for a batch that is a Pair, got no on"),
    (Record(1, 2), ..., ..., "on must be passed for a batch that is a Record, got no on"),
    (TENSOR, "images", ..., "on must be left out for a batch that is a single Tensor, got 'images'"),
    (TENSOR, 0, ..., "on must be left out for a batch that is a single Tensor, got 0"),
    (PAIR, 2, ..., "on must be an index of a tuple of 2, got 2"),
    (PAIR, -3, ..., "on must be an index of a tuple of 2, got -3"),
    (PAIR, "images", ..., "on must be an index of a tuple of 2, got 'images'"),
    (PAIR, True, ..., "on must be an index of a tuple of 2, got True"),
    ((), 0, ..., "on must be an index of a tuple of 0, got 0"),
    (PAIR, (0, 5), ..., "on must be an index of a tuple of 2, got 5"),
    (FIELDS, "image", ..., "on must name a member of the dict, got 'image'"),
    (FIELDS, ("images", "mask"), ..., "on must name a member of the dict, got 'mask'"),
    (FIELDS, {"image": "input"}, ..., "on must name a member of the dict, got 'image'"),
    (Pair(1, 2), 0, ..., "on must name a member of the Pair, got 0"),
    (Frozen(1, 2), "image", ..., "on must name a member of the Frozen, got 'image'"),
    (TENSOR, ..., "views", "into must be left out for a batch that is a single Tensor, got 'views'"),
    (PAIR, ..., 3, "into must be an index of a tuple of 2, or the index after its end, without repetition or gap, got 3"),
    (PAIR, ..., -3, "into must be an index of a tuple of 2, or the index after its end, without repetition or gap, got -3"),
    (
        PAIR,
        ...,
        "views",
        "into must be an index of a tuple of 2, or the index after its end, without repetition or gap, got 'views'",
    ),
    (Pair(1, 2), "images", "views", "into must be a field of Pair, which has a fixed set of fields, got 'views'"),
    (Slots(1, 2), "images", "views", "into must be a field of Slots, which has a fixed set of fields, got 'views'"),
]


@pytest.mark.parametrize(("batch", "on", "into", "text"), DOES_NOT_FIT)
def test_on_or_into_that_does_not_fit_names_members(batch, on, into, text):
    selection = Selection(on, into, kind="Kind")
    with pytest.raises(SelectionError) as caught:
        selection.write(batch, selection.read(batch)[0])
    assert str(caught.value).startswith(text)
    if type(batch) not in (tuple, torch.Tensor):
        assert "has 'images', 'labels'" in str(caught.value)
    assert isinstance(caught.value, LookupError)


def test_into_gap_past_end_is_refused():
    with pytest.raises(SelectionError) as caught:
        Selection(..., (0, 3), kind="Kind").write(PAIR, ("a", "b"))
    assert "into must be an index of a tuple of 2, or the index after its end, without repetition or gap, got 0, 3" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (("a",), "1 in a tuple"),
        (["a", "b", "c"], "3 in a list"),
        (torch.zeros(2), "Tensor"),
        (None, "NoneType"),
        ({"a": 1, "b": 2}, "dict"),
    ],
)
@pytest.mark.parametrize("into", [..., (0, 1)])
def test_number_of_results_must_match_into(result, got, into):
    with pytest.raises(ArgumentError) as caught:
        Selection((0, 1), into, kind="Kind").write(PAIR, result)
    assert f"The transform must return 2 values, one for each of 0, 1, got {got}" in str(caught.value)


@pytest.mark.parametrize("batch", [(), [], {}])
def test_selection_error_of_empty_batch(batch):
    with pytest.raises(SelectionError) as caught:
        Selection(..., ..., kind="Kind").read(batch)
    assert "-1" not in str(caught.value)
    assert "'name'" not in str(caught.value)


def test_unset_field_is_missing():
    @dataclasses.dataclass
    class Partial:
        images: object
        boxes: object = dataclasses.field(init=False)

    with pytest.raises(SelectionError, match="got 'boxes'"):
        Selection("boxes", ..., kind="Kind").read(Partial(1))


@pytest.mark.parametrize(
    ("twice", "kind", "text"),
    [
        ((0, 0), ArgumentError, "into must name each member once, got (0, 0)"),
        (
            (0, -2),
            SelectionError,
            "into must be an index of a tuple of 2, or the index after its end, without repetition or gap, got 0, -2",
        ),
    ],
)
def test_into_duplicate_places_is_refused(twice, kind, text):
    with pytest.raises(kind) as caught:
        Selection(..., twice, kind="Kind").write(PAIR, ("a", "b"))
    assert str(caught.value).startswith(text)
