"""``on`` and ``into`` that do not fit the batch, and errors that name what would."""

import dataclasses

import pytest
import torch
from support.containers import Frozen, Pair, Record, Slots

from gpuaug import ArgumentError, FeatureStage, SelectionError, StreamedLoader, TransformStage
from gpuaug.stages.selection import Selection

TENSOR, PAIR, FIELDS = torch.zeros(1), (1, 2), {"images": 1, "labels": 2}

DOES_NOT_FIT = [
    (
        FIELDS,
        ...,
        ...,
        "on must name what the stage works on in a dict, got nothing. It has 'images', 'labels': write Kind(…, on='images').",
    ),
    (
        Pair(1, 2),
        ...,
        ...,
        "on must name what the stage works on in a Pair, got nothing. It has 'images', 'labels': write Kind(…, on='images').",
    ),
    (
        Record(1, 2),
        ...,
        ...,
        "on must name what the stage works on in a Record, got nothing. It has 'images', 'labels': write Kind(…, on='images').",
    ),
    (
        TENSOR,
        "images",
        ...,
        "on must be left out for a batch that is a single Tensor, got 'images'. "
        "Leave it out, or return a tuple or dict from collate_fn.",
    ),
    (
        TENSOR,
        0,
        ...,
        "on must be left out for a batch that is a single Tensor, got 0. "
        "Leave it out, or return a tuple or dict from collate_fn.",
    ),
    (PAIR, 2, ..., "on must be an index of a tuple of 2, got 2. Give one from 0 to 1."),
    (PAIR, -3, ..., "on must be an index of a tuple of 2, got -3. Give one from 0 to 1."),
    (PAIR, "images", ..., "on must be an index of a tuple of 2, got 'images'. Give one from 0 to 1."),
    (PAIR, True, ..., "on must be an index of a tuple of 2, got True. Give one from 0 to 1."),
    ((), 0, ..., "on must be an index of a tuple of 0, got 0. Say on=None for batches that may be empty."),
    (PAIR, (0, 5), ..., "on must be an index of a tuple of 2, got 5. Give one from 0 to 1."),
    (FIELDS, "image", ..., "on must name a member of the dict, got 'image'. It has 'images', 'labels'."),
    (FIELDS, ("images", "mask"), ..., "on must name a member of the dict, got 'mask'. It has 'images', 'labels'."),
    (FIELDS, {"image": "input"}, ..., "on must name a member of the dict, got 'image'. It has 'images', 'labels'."),
    (Pair(1, 2), 0, ..., "on must name a member of the Pair, got 0. It has 'images', 'labels'."),
    (Frozen(1, 2), "image", ..., "on must name a member of the Frozen, got 'image'. It has 'images', 'labels'."),
    (
        TENSOR,
        ...,
        "views",
        "into must be left out for a batch that is a single Tensor, got 'views'. "
        "Return a tuple or dict from collate_fn to have room for another member.",
    ),
    (PAIR, ..., 3, "into must be an index of a tuple of 2 or the one past its end, got 3. Give one from 0 to 2."),
    (PAIR, ..., -3, "into must be an index of a tuple of 2 or the one past its end, got -3. Give one from 0 to 2."),
    (
        PAIR,
        ...,
        "views",
        "into must be an index of a tuple of 2 or the one past its end, got 'views'. Give one from 0 to 2.",
    ),
    (
        Pair(1, 2),
        "images",
        "views",
        "into must be a field of Pair, which cannot grow, got 'views'. It has 'images', 'labels'.",
    ),
    (
        Slots(1, 2),
        "images",
        "views",
        "into must be a field of Slots, which cannot grow, got 'views'. It has 'images', 'labels'.",
    ),
]


@pytest.mark.parametrize(("batch", "on", "into", "text"), DOES_NOT_FIT)
def test_on_or_into_that_does_not_fit_names_members(batch, on, into, text):
    selection = Selection(on, into, kind="Kind")
    with pytest.raises(SelectionError) as caught:
        selection.write(batch, selection.read(batch)[0])
    assert str(caught.value) == text
    assert isinstance(caught.value, LookupError)


def test_into_gap_past_end_is_refused():
    with pytest.raises(SelectionError) as caught:
        Selection(..., (0, 3), kind="Kind").write(PAIR, ("a", "b"))
    assert str(caught.value) == "into must leave no gap past the end of a tuple of 2, got [3]. Start at 2."


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
    assert str(caught.value) == (
        f"The transform must return 2 values, one for each of 0, 1, got {got}. "
        "Return a tuple in that order, or name with into= the one place where the whole result goes."
    )


def test_into_with_on_none_is_refused():
    with pytest.raises(ArgumentError) as caught:
        TransformStage(len, on=None, into="views")
    assert str(caught.value) == (
        "into must be left out when on=None hands over the whole batch, got 'views'. "
        "Put the result where it belongs in the transform itself."
    )


@pytest.mark.parametrize(("on", "got"), [((), "()"), ({}, "{}")])
def test_on_must_not_be_empty(on, got):
    with pytest.raises(ArgumentError) as caught:
        TransformStage(len, on=on)
    assert str(caught.value) == f"on must name at least one member of the batch, got {got}. Leave it out for the default."


@pytest.mark.parametrize(("into", "got"), [((), "()"), (None, "None")])
def test_into_must_not_be_empty(into, got):
    with pytest.raises(ArgumentError) as caught:
        TransformStage(len, into=into)
    assert str(caught.value) == f"into must name at least one member of the batch, got {got}. Leave it out for the default."


@pytest.mark.parametrize("what", ["on", "into"])
@pytest.mark.parametrize("given", [["a"], (["a"],), {"a"}, torch.tensor(0)])
def test_selectors_must_be_hashable(what, given):
    with pytest.raises(ArgumentError) as caught:
        TransformStage(len, **{what: given})
    assert str(caught.value) == (
        f"{what} must be a key, an index or a tuple of them, got {given!r}. Name several in a tuple: (0, 1)."
    )


def test_data_keys_of_on_must_be_names():
    with pytest.raises(ArgumentError) as caught:
        TransformStage(len, on={0: 1})
    assert str(caught.value) == ("on must map members to data keys, got {0: 1}. Write Kornia's names: {0: 'input', 1: 'mask'}.")


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
        ((0, 0), ArgumentError, "into must name each member once, got (0, 0). Leave the repeated one out."),
        ((0, -2), SelectionError, "into must name each member of a tuple of 2 once, got (0, -2). Count all from the start."),
    ],
)
def test_into_duplicate_places_is_refused(twice, kind, text):
    with pytest.raises(kind) as caught:
        Selection(..., twice, kind="Kind").write(PAIR, ("a", "b"))
    assert str(caught.value) == text


def test_selection_error_names_stage_class():
    with pytest.raises(SelectionError, match=r"write TransformStage\(…, on='images'\)\."):
        next(iter(StreamedLoader([FIELDS], [TransformStage(len)], device="cpu")))
    with pytest.raises(SelectionError, match=r"write FeatureStage\(…, on='images'\)\."):
        next(iter(StreamedLoader([FIELDS], [FeatureStage(torch.nn.Identity())], device="cpu")))
