"""``on`` and ``into``: what a stage works on, and where its result goes, in every form of batch."""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import NamedTuple

import kornia.augmentation as K
import pytest
import torch
from support.mappings import Fixed, Store
from torch.nn.utils.rnn import pack_sequence

from gpuaug import ArgumentError, FeatureStage, SelectionError, StreamedLoader, TransformStage
from gpuaug.core.batch import leaves
from gpuaug.stages.selection import Selection

Pair = namedtuple("Pair", ["images", "labels"])


class Sample(NamedTuple):
    images: object
    labels: object


@dataclasses.dataclass
class Record:
    images: object
    labels: object


@dataclasses.dataclass(frozen=True)
class Frozen:
    images: object
    labels: object


@dataclasses.dataclass(slots=True)
class Slots:
    images: object
    labels: object


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    images: object
    labels: object


@dataclasses.dataclass
class Derived:
    images: object
    labels: object
    count: int = dataclasses.field(init=False)

    def __post_init__(self):
        self.count = len(self.labels)


def keyed(kind):
    return lambda images, labels: kind({"images": images, "labels": labels})


SEQUENCES = {"tuple": lambda *items: items, "list": lambda *items: list(items)}
MAPPINGS = {
    "dict": keyed(dict),
    "OrderedDict": keyed(OrderedDict),
    "defaultdict": keyed(lambda items: defaultdict(list, items)),
    "UserDict": keyed(UserDict),
    "mapping proxy": keyed(MappingProxyType),
    "immutable mapping": keyed(Fixed),
    "mutable mapping": keyed(Store),
}
RECORDS = {
    "named tuple": Pair,
    "typed named tuple": Sample,
    "dataclass": Record,
    "frozen dataclass": Frozen,
    "dataclass with slots": Slots,
    "frozen dataclass with slots": FrozenSlots,
    "dataclass with a derived field": Derived,
}
CONTAINERS = SEQUENCES | MAPPINGS | RECORDS

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
def test_a_stage_works_on_the_member_that_it_names(make):
    batch = a_batch(make)
    images, labels = leaves(batch)[:2]
    on, _ = places(batch)
    result = streamed(batch, TransformStage(lambda x: x + 1, on=on))
    assert type(result) is type(batch)
    assert torch.equal(leaves(result)[0], images + 1)
    assert leaves(result)[1] is labels
    assert len(leaves(result)) == len(leaves(batch))


@every_container
def test_the_wrapped_loader_s_batch_is_left_as_it_was(make):
    batch = a_batch(make)
    images, labels = leaves(batch)[:2]
    source = [batch]
    loader = StreamedLoader(source, [TransformStage(lambda x: x + 1, on=places(batch)[0])], device="cpu")
    first, second = [next(iter(loader)) for _ in range(2)]
    assert torch.equal(leaves(first)[0], leaves(second)[0]), "the second epoch was given the first one's result"
    assert source[0] is batch
    assert leaves(batch)[0] is images
    assert leaves(batch)[1] is labels
    assert images.eq(0).all()


@every_container
def test_a_result_goes_into_another_member_and_the_source_is_kept(make):
    batch = a_batch(make)
    images, _ = leaves(batch)[:2]
    on, into = places(batch)
    result = streamed(batch, TransformStage(lambda x: x + 1, on=on, into=into))
    assert leaves(result)[0] is images
    assert torch.equal(leaves(result)[1], images + 1)


@every_container
def test_several_members_are_passed_in_order_and_replaced_in_order(make):
    batch = a_batch(make)
    images, labels = leaves(batch)[:2]
    first, second = places(batch)
    result = streamed(batch, TransformStage(lambda y, x: (y * 10, x + 1), on=(second, first)))
    assert type(result) is type(batch)
    assert torch.equal(leaves(result)[0], images + 1)
    assert torch.equal(leaves(result)[1], labels * 10)


@every_container
def test_several_members_may_give_one_result(make):
    batch = a_batch(make)
    first, second = places(batch)
    result = streamed(batch, TransformStage(lambda x, y: (x.sum(), y.sum()), on=(first, second), into=second))
    assert [value.item() for value in leaves(result)[1:3]] == [0, 3], "the result is taken whole, whatever its type"


@every_container
def test_the_whole_batch_is_handed_over_on_request(make):
    batch = a_batch(make)
    seen = []
    result = streamed(batch, TransformStage(lambda whole: seen.append(whole) or "a whole batch", on=None))
    assert seen == [batch]
    assert result == "a whole batch"


@every_mapping
def test_a_mapping_grows_by_a_new_key(make):
    batch = a_batch(make)
    result = streamed(batch, TransformStage(lambda x: x + 1, on="images", into="views"))
    assert type(result) is type(batch)
    assert list(result) == ["images", "labels", "views"]
    assert result["images"] is batch["images"]
    assert list(batch) == ["images", "labels"]


@every_sequence
def test_a_sequence_grows_by_the_index_one_past_its_end(make):
    batch = a_batch(make)
    result = streamed(batch, TransformStage(lambda x: x + 1, into=2))
    assert type(result) is type(batch)
    assert len(result) == 3
    assert result[0] is batch[0]
    assert torch.equal(result[2], batch[0] + 1)
    assert len(batch) == 2


@every_sequence
def test_a_sequence_grows_by_several_at_once(make):
    batch = a_batch(make)
    result = streamed(batch, TransformStage(lambda x: ("a", "b"), into=(3, 2)))
    assert list(result[2:]) == ["b", "a"]


@every_sequence
def test_left_out_means_the_first_of_a_sequence(make):
    batch = a_batch(make)
    result = streamed(batch, lambda x: x + 1)
    assert torch.equal(result[0], batch[0] + 1)
    assert result[1] is batch[1]


@every_sequence
def test_a_negative_index_counts_from_the_end(make):
    batch = a_batch(make)
    result = streamed(batch, TransformStage(lambda y: y * 2, on=-1))
    assert result[0] is batch[0]
    assert result[1].tolist() == [2, 4]
    result = streamed(batch, TransformStage(lambda x: x.sum(), into=-1))
    assert len(result) == 2
    assert result[1] == 0


def test_a_batch_that_is_one_tensor_needs_no_selection():
    assert streamed(torch.zeros(2), lambda x: x + 1).tolist() == [1, 1]
    assert streamed(torch.zeros(2), lambda x: {"views": x}) == {"views": pytest.approx(torch.zeros(2))}


def test_a_batch_that_moves_itself_needs_no_selection():
    packed = pack_sequence([torch.zeros(2)])
    assert streamed(packed, lambda batch: batch.data.shape) == torch.Size([2])


def test_a_mapping_s_keys_may_be_any_hashable():
    batch = {0: torch.zeros(1), ("a", 1): torch.ones(1)}
    assert streamed(batch, TransformStage(lambda x: x + 5, on=0))[0] == 5
    stage = TransformStage(lambda x: (x + 5,), on=(("a", 1),))
    assert streamed(batch, stage)["a", 1] == 6


def test_a_single_member_takes_the_result_whole_whatever_its_type():
    batch = (torch.zeros(1), torch.ones(1))
    result = streamed(batch, lambda x: (x + 1, x + 2))
    assert isinstance(result[0], tuple)
    assert result[1] is batch[1]


def test_stages_see_what_the_stages_before_them_put_there():
    batch = {"images": torch.zeros(1)}
    stages = [
        TransformStage(lambda x: x + 1, on="images", into="views"),
        TransformStage(lambda x: x * 10, on="views"),
        FeatureStage(torch.nn.Identity(), on="views", into="features"),
    ]
    result = streamed(batch, *stages)
    assert {key: value.item() for key, value in result.items()} == {"images": 0, "views": 10, "features": 10}


# Kornia's names for what values are


def flip():
    return K.AugmentationSequential(K.RandomHorizontalFlip(p=1.0))


def images_and_masks():
    torch.manual_seed(0)
    return torch.rand(2, 3, 4, 6), torch.randint(0, 2, (2, 1, 4, 6)).float()


def test_kornia_is_told_which_member_is_what():
    images, masks = images_and_masks()
    stage = TransformStage(flip(), on={"image": "input", "mask": "mask"})
    result = streamed({"mask": masks, "image": images, "label": 3}, stage)
    assert torch.equal(result["image"], images.flip(-1))
    assert torch.equal(result["mask"], masks.flip(-1))
    assert result["label"] == 3


def test_kornia_s_names_work_for_indices_too():
    images, masks = images_and_masks()
    result = streamed([masks, images], TransformStage(flip(), on={1: "input", 0: "mask"}))
    assert torch.equal(result[0], masks.flip(-1))
    assert torch.equal(result[1], images.flip(-1))


def test_kornia_s_single_result_is_taken_as_it_is():
    images, _ = images_and_masks()
    result = streamed({"image": images}, TransformStage(flip(), on={"image": "input"}))
    assert torch.equal(result["image"], images.flip(-1))
    result = streamed({"image": images}, TransformStage(flip(), on={"image": "input"}, into="view"))
    assert result["image"] is images
    assert torch.equal(result["view"], images.flip(-1))


def test_kornia_s_results_may_go_elsewhere():
    images, masks = images_and_masks()
    stage = TransformStage(flip(), on={"image": "input", "mask": "mask"}, into=("view", "view_mask"))
    result = streamed({"image": images, "mask": masks}, stage)
    assert result["image"] is images
    assert torch.equal(result["view"], images.flip(-1))
    assert torch.equal(result["view_mask"], masks.flip(-1))


def test_data_keys_are_passed_only_where_they_were_given():
    seen = []

    def transform(*values, **options):
        seen.append(options)
        return values[0]

    streamed((1, 2), transform)
    streamed((1, 2), TransformStage(transform, on={0: "input"}))
    assert seen == [{}, {"data_keys": ["input"]}]


# What does not fit is said with what would

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
def test_what_does_not_fit_is_said_with_what_would(batch, on, into, text):
    selection = Selection(on, into, kind="Kind")
    with pytest.raises(SelectionError) as caught:
        selection.write(batch, selection.read(batch)[0])
    assert str(caught.value) == text
    assert isinstance(caught.value, LookupError)


def test_a_gap_past_the_end_is_refused():
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
def test_as_many_results_as_places(result, got, into):
    with pytest.raises(ArgumentError) as caught:
        Selection((0, 1), into, kind="Kind").write(PAIR, result)
    assert str(caught.value) == (
        f"The transform must return 2 values, one for each of 0, 1, got {got}. "
        "Return a tuple in that order, or name with into= the one place where the whole result goes."
    )


def test_into_has_no_place_beside_the_whole_batch():
    with pytest.raises(ArgumentError) as caught:
        TransformStage(len, on=None, into="views")
    assert str(caught.value) == (
        "into must be left out when on=None hands over the whole batch, got 'views'. "
        "Put the result where it belongs in the transform itself."
    )


@pytest.mark.parametrize(("on", "got"), [((), "()"), ({}, "{}")])
def test_on_names_something(on, got):
    with pytest.raises(ArgumentError) as caught:
        TransformStage(len, on=on)
    assert str(caught.value) == f"on must name at least one member of the batch, got {got}. Leave it out for the default."


@pytest.mark.parametrize("batch", [(), [], {}])
def test_an_empty_batch_has_nothing_to_work_on_and_no_line_to_type_is_made_up(batch):
    with pytest.raises(SelectionError) as caught:
        Selection(..., ..., kind="Kind").read(batch)
    assert "-1" not in str(caught.value)
    assert "'name'" not in str(caught.value)


def test_a_field_that_was_never_set_is_said_to_be_missing():
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
def test_two_results_do_not_go_into_one_place(twice, kind, text):
    with pytest.raises(kind) as caught:
        Selection(..., twice, kind="Kind").write(PAIR, ("a", "b"))
    assert str(caught.value) == text


def test_the_line_to_type_names_the_stage_s_class():
    with pytest.raises(SelectionError, match=r"write TransformStage\(…, on='images'\)\."):
        streamed(FIELDS, TransformStage(len))
    with pytest.raises(SelectionError, match=r"write FeatureStage\(…, on='images'\)\."):
        streamed(FIELDS, FeatureStage(torch.nn.Identity()))
