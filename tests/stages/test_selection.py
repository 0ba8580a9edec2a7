"""``on`` and ``into``: what a stage works on, and where its result goes, in every form of batch."""

import dataclasses
import functools

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from support.batches.containers import MAPPINGS, RECORDS, Derived, Frozen, Pair, Record, Slots
from torch.nn.utils.rnn import pack_sequence
from torchvision.transforms import v2

from gpuaug import (
    ArgumentError,
    ArgumentTypeError,
    FeatureStage,
    SelectionError,
    StreamedLoader,
    TransformStage,
    fuse,
    sanitize,
)
from gpuaug.core.batch import leaves
from gpuaug.stages.selection import Selection

SEQUENCES = {"tuple": lambda *items: items, "list": lambda *items: list(items)}
CONTAINERS = SEQUENCES | MAPPINGS | RECORDS | {"dataclass with a derived field": Derived}

every_container = pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())
every_sequence = pytest.mark.parametrize("make", SEQUENCES.values(), ids=SEQUENCES.keys())
every_mapping = pytest.mark.parametrize("make", MAPPINGS.values(), ids=MAPPINGS.keys())


def a_batch(make):
    return make(torch.zeros(2, 3), torch.tensor([1, 2]))


def places(batch):
    """How one writes the images and the labels of ``batch``."""
    return (0, 1) if type(batch) in {tuple, list} else ("images", "labels")


def streamed(batch, *stages):
    (result,) = StreamedLoader([batch], stages, device="cpu")
    return result


@every_container
def test_on_selects_a_member_and_the_wrapped_loaders_batch_does_not_change(make):
    batch = a_batch(make)
    images, labels = leaves(batch)[:2]
    source = [batch]
    loader = StreamedLoader(source, [TransformStage(lambda x: x + 1, on=places(batch)[0])], device="cpu")
    first, second = [next(iter(loader)) for _ in range(2)]
    for result in (first, second):
        assert type(result) is type(batch)
        assert torch.equal(leaves(result)[0], torch.ones(2, 3)), "the second epoch was given the first one's result"
        assert leaves(result)[1] is labels
        assert len(leaves(result)) == len(leaves(batch))
    assert source[0] is batch
    assert leaves(batch)[0] is images
    assert leaves(batch)[1] is labels
    assert images.eq(0).all()


@every_container
def test_into_writes_other_member_and_keeps_source(make):
    batch = a_batch(make)
    images, _ = leaves(batch)[:2]
    on, into = places(batch)
    result = streamed(batch, TransformStage(lambda x: x + 1, on=on, into=into))
    assert leaves(result)[0] is images
    assert torch.equal(leaves(result)[1], images + 1)


@every_container
def test_on_several_members_replaces_them_in_order(make):
    batch = a_batch(make)
    images, labels = leaves(batch)[:2]
    first, second = places(batch)
    result = streamed(batch, TransformStage(lambda y, x: (y * 10, x + 1), on=(second, first)))
    assert type(result) is type(batch)
    assert torch.equal(leaves(result)[0], images + 1)
    assert torch.equal(leaves(result)[1], labels * 10)


@every_container
def test_on_several_members_into_one(make):
    batch = a_batch(make)
    first, second = places(batch)
    result = streamed(batch, TransformStage(lambda x, y: (x.sum(), y.sum()), on=(first, second), into=second))
    assert [value.item() for value in leaves(result)[1:3]] == [0, 3], "the result is taken whole, whatever its type"


@every_container
def test_on_none_passes_whole_batch(make):
    batch = a_batch(make)
    seen = []
    result = streamed(batch, TransformStage(lambda whole: seen.append(whole) or "a whole batch", on=None))
    assert seen == [batch]
    assert result == "a whole batch"


@every_mapping
def test_into_new_key_of_mapping(make):
    batch = a_batch(make)
    result = streamed(batch, TransformStage(lambda x: x + 1, on="images", into="views"))
    assert type(result) is type(batch)
    assert list(result) == ["images", "labels", "views"]
    assert result["images"] is batch["images"]
    assert list(batch) == ["images", "labels"]


@every_sequence
def test_into_index_past_end_appends(make):
    batch = a_batch(make)
    result = streamed(batch, TransformStage(lambda x: x + 1, into=2))
    assert type(result) is type(batch)
    assert len(result) == 3
    assert result[0] is batch[0]
    assert torch.equal(result[2], batch[0] + 1)
    assert len(batch) == 2


@every_sequence
def test_into_several_indices_past_end_appends(make):
    batch = a_batch(make)
    result = streamed(batch, TransformStage(lambda x: ("a", "b"), into=(3, 2)))
    assert list(result[2:]) == ["b", "a"]


@every_sequence
def test_on_defaults_to_first_of_sequence(make):
    batch = a_batch(make)
    result = streamed(batch, lambda x: x + 1)
    assert torch.equal(result[0], batch[0] + 1)
    assert result[1] is batch[1]


@every_sequence
def test_on_negative_index(make):
    batch = a_batch(make)
    result = streamed(batch, TransformStage(lambda y: y * 2, on=-1))
    assert result[0] is batch[0]
    assert result[1].tolist() == [2, 4]
    result = streamed(batch, TransformStage(lambda x: x.sum(), into=-1))
    assert len(result) == 2
    assert result[1] == 0


def test_single_tensor_batch_needs_no_on():
    assert streamed(torch.zeros(2), lambda x: x + 1).tolist() == [1, 1]
    assert streamed(torch.zeros(2), lambda x: {"views": x}) == {"views": pytest.approx(torch.zeros(2))}


def test_batch_with_to_needs_no_on():
    packed = pack_sequence([torch.zeros(2)])
    assert streamed(packed, lambda batch: batch.data.shape) == torch.Size([2])


def test_on_any_hashable_key():
    batch = {0: torch.zeros(1), ("a", 1): torch.ones(1)}
    assert streamed(batch, TransformStage(lambda x: x + 5, on=0))[0] == 5
    stage = TransformStage(lambda x: (x + 5,), on=(("a", 1),))
    assert streamed(batch, stage)["a", 1] == 6


def test_single_member_takes_whole_result():
    batch = (torch.zeros(1), torch.ones(1))
    result = streamed(batch, lambda x: (x + 1, x + 2))
    assert isinstance(result[0], tuple)
    assert result[1] is batch[1]


def test_stages_see_results_of_earlier_stages():
    batch = {"images": torch.zeros(1)}
    stages = [
        TransformStage(lambda x: x + 1, on="images", into="views"),
        TransformStage(lambda x: x * 10, on="views"),
        FeatureStage(torch.nn.Identity(), on="views", into="features"),
    ]
    result = streamed(batch, *stages)
    assert {key: value.item() for key, value in result.items()} == {"images": 0, "views": 10, "features": 10}


# Kornia's names for what values are


FROM_KORNIA = {  # on, into; where the flipped images and masks are
    "names": ({"image": "input", "mask": "mask"}, ..., ("image", "mask")),
    "names, in another order": ({"mask": "mask", "image": "input"}, ..., ("image", "mask")),
    "indices": ({1: "input", 0: "mask"}, ..., (1, 0)),
    "into others": ({"image": "input", "mask": "mask"}, ("view", "view_mask"), ("view", "view_mask")),
    "one": ({"image": "input"}, ..., ("image",)),
    "one, into another": ({"image": "input"}, "view", ("view",)),
}


@pytest.mark.parametrize(("on", "into", "written"), FROM_KORNIA.values(), ids=FROM_KORNIA.keys())
def test_on_mapping_passes_data_keys_to_kornia(on, into, written):
    images, masks = torch.rand(2, 3, 4, 6), torch.randint(0, 2, (2, 1, 4, 6)).float()
    batch = [masks, images] if 0 in on else {"image": images, "label": 3} if len(on) == 1 else {"mask": masks, "image": images}
    flip = K.AugmentationSequential(K.RandomHorizontalFlip(p=1.0))
    result = streamed(batch, TransformStage(flip, on=on, into=into))
    for place, value in zip(written, (images, masks), strict=False):
        assert torch.equal(result[place], value.flip(-1))
    for place in range(2) if type(batch) is list else batch:
        assert place in written or result[place] is batch[place]


def test_data_keys_are_passed_only_for_on_mapping():
    seen = []

    def transform(*values, **options):
        seen.append(options)
        return values[0]

    streamed((1, 2), transform)
    streamed((1, 2), TransformStage(transform, on={0: "input"}))
    assert seen == [{}, {"data_keys": ["input"]}]


class Negative(torch.nn.Module):
    def forward(self, value, data_keys=()):
        return -value


class Called:
    def __call__(self, value, *, data_keys):
        return -value


class CalledModule(torch.nn.Module):
    __call__ = Called.__call__


WITH_DATA_KEYS = {
    "function": lambda value, data_keys: -value,
    "options": lambda value, **options: -value,
    "module": Negative(),
    "object": Called(),
    "method": Called().__call__,
    "module with another call": CalledModule(),
    "partial": functools.partial(lambda first, value, data_keys: -value, None),
    "Kornia's module": K.AugmentationSequential(K.RandomInvert(p=0.0)),
    "fused": fuse(K.RandomInvert(p=0.0)),
}
WITHOUT_DATA_KEYS = {
    "function": lambda value: -value,
    "values": lambda *values: -values[0],
    "module": torch.nn.Identity(),
    "method": torch.nn.Identity().forward,
    "partial": functools.partial(lambda first, value: -value, None),
    "torchvision's transform": v2.RandomHorizontalFlip(),
    "sanitize": sanitize,
}


@pytest.mark.parametrize("name", WITH_DATA_KEYS)
def test_a_mapping_needs_a_transform_with_data_keys(name):
    streamed((torch.zeros(2, 3, 4, 6), 2), TransformStage(WITH_DATA_KEYS[name], on={0: "input"}))


@pytest.mark.parametrize("name", WITHOUT_DATA_KEYS)
def test_a_mapping_for_a_transform_without_data_keys_is_an_error(name):
    with pytest.raises(ArgumentTypeError, match=r"data_keys if on is a mapping, got .*Pass on=\(0, 'a'\)\."):
        TransformStage(WITHOUT_DATA_KEYS[name], on={0: "input", "a": "mask"})


# Members that do not fit


TENSOR, PAIR, FIELDS = torch.zeros(1), (1, 2), {"images": 1, "labels": 2}

DOES_NOT_FIT = [
    (FIELDS, ..., ..., "on must be passed for a batch that is a dict, got no on"),
    (Pair(1, 2), ..., ..., "on must be passed for a batch that is a Pair, got no on"),
    (Record(1, 2), ..., ..., "on must be passed for a batch that is a Record, got no on"),
    (TENSOR, "images", ..., "on must name a member of the batch, a Tensor of 0, got 'images'"),
    (TENSOR, 0, ..., "on must name a member of the batch, a Tensor of 0, got 0"),
    (PAIR, 2, ..., "on must name a member of the batch, a tuple of 2, got 2"),
    (PAIR, -3, ..., "on must name a member of the batch, a tuple of 2, got -3"),
    (PAIR, "images", ..., "on must name a member of the batch, a tuple of 2, got 'images'"),
    (PAIR, True, ..., "on must name a member of the batch, a tuple of 2, got True"),
    ((), 0, ..., "on must name a member of the batch, a tuple of 0, got 0"),
    (PAIR, (0, 5), ..., "on must name a member of the batch, a tuple of 2, got 5"),
    (FIELDS, "image", ..., "on must name a member of the batch, a dict of 2, got 'image'"),
    (FIELDS, ("images", "mask"), ..., "on must name a member of the batch, a dict of 2, got 'mask'"),
    (FIELDS, {"image": "input"}, ..., "on must name a member of the batch, a dict of 2, got 'image'"),
    (Pair(1, 2), 0, ..., "on must name a member of the batch, a Pair of 2, got 0"),
    (Frozen(1, 2), "image", ..., "on must name a member of the batch, a Frozen of 2, got 'image'"),
    (TENSOR, ..., "views", "into must name members of a Tensor, got 'views'"),
    (PAIR, ..., 3, "into must be an index of a tuple of 2, or the index after its end, without repetition or gap, got 3"),
    (PAIR, ..., -3, "into must be an index of a tuple of 2, or the index after its end, without repetition or gap, got -3"),
    (
        PAIR,
        ...,
        "views",
        "into must be an index of a tuple of 2, or the index after its end, without repetition or gap, got 'views'",
    ),
    (Pair(1, 2), "images", "views", "into must name members of a Pair, got 'views'"),
    (Slots(1, 2), "images", "views", "into must name members of a Slots, got 'views'"),
]


@pytest.mark.parametrize(("batch", "on", "into", "text"), DOES_NOT_FIT)
def test_on_or_into_that_does_not_fit_names_members(batch, on, into, text):
    selection = Selection(on, into, stage_class="Kind")
    with pytest.raises(SelectionError) as caught:
        selection.write(batch, selection.read(batch)[0])
    assert str(caught.value).startswith(text)
    if type(batch) not in (tuple, torch.Tensor):
        assert "has 'images', 'labels'" in str(caught.value)
    assert isinstance(caught.value, LookupError)


@pytest.mark.parametrize("index", [np.int64(-1), np.uint8(1)])
def test_integers_of_numpy_are_indices(index):
    selection = Selection(index, ..., stage_class="Kind")
    assert selection.read(PAIR) == (PAIR[1],)
    assert selection.names(PAIR) == [1]
    assert selection.write(PAIR, "new") == (PAIR[0], "new")


@pytest.mark.parametrize("into", [(0, 3), (0, -2)])
def test_into_with_a_gap_or_a_repetition_is_refused(into):
    with pytest.raises(SelectionError, match=f"without repetition or gap, got {into[0]}, {into[1]}"):
        Selection(..., into, stage_class="Kind").write(PAIR, ("a", "b"))


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
        Selection((0, 1), into, stage_class="Kind").write(PAIR, result)
    assert f"The transform must return 2 values, one for each of 0, 1, got {got}" in str(caught.value)


@pytest.mark.parametrize("batch", [(), [], {}])
def test_selection_error_of_empty_batch(batch):
    with pytest.raises(SelectionError) as caught:
        Selection(..., ..., stage_class="Kind").read(batch)
    assert "-1" not in str(caught.value)
    assert "'name'" not in str(caught.value)


def test_unset_field_is_missing():
    @dataclasses.dataclass
    class Partial:
        images: object
        boxes: object = dataclasses.field(init=False)

    with pytest.raises(SelectionError, match="got 'boxes'"):
        Selection("boxes", ..., stage_class="Kind").read(Partial(1))


def test_into_that_names_a_member_twice_is_refused():
    with pytest.raises(ArgumentError, match=r"into must name each member once, got \(0, 0\)"):
        Selection(..., (0, 0), stage_class="Kind")
