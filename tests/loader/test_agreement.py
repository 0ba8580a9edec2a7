"""What a run must have in common with its state: a difference is refused by name, or taken with a warning."""

import copy
import warnings

import kornia.augmentation as K
import pytest
import torch
from support.loader.checkpoints import Shards, Tape, saved, stopped_at
from support.loader.resumed_loaders import DATA, OPTIONS, SAMPLES, Epochs, generator, loader, values
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchvision.transforms import v2

from gpuaug import ArgumentError, FeatureStage, GpuAugWarning, StreamedLoader, TransformStage, fuse, schedule, until
from gpuaug.core.errors import shown

STRICT = "To resume with different batches, pass strict=False to load_state_dict."


def brighter(images, by=0.1):
    return images + by


def pipeline(p=0.5, **options):
    return K.AugmentationSequential(K.RandomHorizontalFlip(p=p), K.RandomVerticalFlip(p=0.3), **options)


def encoder(width=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(12, width)).requires_grad_(False)


DIFFERENT = {
    "a probability": (fuse(pipeline()), fuse(pipeline(0.8)), "RandomHorizontalFlip(p=0.5", "RandomHorizontalFlip(p=0.8"),
    "which apply": (pipeline(), pipeline(random_apply=1), "random_apply=False", "random_apply=(1, 2)"),
    "an option": (fuse(pipeline()), fuse(pipeline(), views=2), "views=1", "views=2"),
    "a bare pipeline": (pipeline(), pipeline(0.8), "RandomHorizontalFlip(p=0.5", "RandomHorizontalFlip(p=0.8"),
    "an encoder": (FeatureStage(encoder()), FeatureStage(encoder(4)), "out_features=3", "out_features=4"),
    "the epoch of a change": (
        until(5, brighter, fuse(pipeline())),
        until(6, brighter, fuse(pipeline())),
        "epochs=(0, 5)",
        "epochs=(0, 6)",
    ),
    "the stage of a later epoch": (
        schedule(lambda p: fuse(pipeline(p)), {0: 0.5, 5: 0.6}),
        schedule(lambda p: fuse(pipeline(p)), {0: 0.5, 5: 0.7}),
        "RandomHorizontalFlip(p=0.6",
        "RandomHorizontalFlip(p=0.7",
    ),
    "a schedule in place of a stage": (brighter, until(5, brighter, fuse(pipeline())), "transform=brighter", "epochs=(0, 5)"),
    "a stage in place of a schedule": (
        until(5, brighter, fuse(pipeline())),
        fuse([v2.RandomInvert()]),
        "epochs=(0, 5)",
        "transform=(RandomInvert(p=0.5",
    ),
    "a pipeline in place of a function": (
        brighter,
        fuse([v2.RandomInvert()]),
        "transform=brighter",
        "transform=(RandomInvert(p=0.5",
    ),
    "a line more": (nn.Sequential(nn.Flatten()), nn.Sequential(nn.Flatten(), nn.Flatten()), "nothing", "(1): Flatten"),
    "far down": (
        nn.Sequential(*(nn.Identity() for _ in range(300))),
        nn.Sequential(*(nn.Identity() for _ in range(301))),
        "…",
        "…",
    ),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_other_stage_is_refused_by_what_differs(kind):
    then, now, before, after = DIFFERENT[kind]
    state = saved(StreamedLoader([torch.zeros(2, 3, 4, 4)], [then], device="cpu", seed=1).state_dict())
    assert len(repr(state)) < 5000
    loader = StreamedLoader([torch.zeros(2, 3, 4, 4)], [now], device="cpu", seed=1)
    with pytest.raises(ArgumentError) as raised:
        loader.load_state_dict(state)
    (name,) = loader.state_dict()["stages"]
    text = str(raised.value)
    assert text.startswith(f"Stage {name!r} must be ")
    assert text.endswith(f". Pass the stage of the saved run. {STRICT}")
    was, got = text.removesuffix(f". Pass the stage of the saved run. {STRICT}").split(", as in the state, got ")
    assert before in was
    assert after in got
    assert not was.endswith("(")
    assert not got.endswith("(")
    with pytest.warns(GpuAugWarning, match=f"stage {name!r} was "):
        loader.load_state_dict(state, strict=False)


@pytest.mark.parametrize(("names", "others"), [("ab", "ba"), ("ab", "a"), ("", "a")])
def test_other_names_of_stages_are_refused(names, others):
    def loader(names):
        return StreamedLoader([torch.zeros(2)], [TransformStage(brighter, name=name) for name in names], device="cpu", seed=1)

    with pytest.raises(ArgumentError) as raised:
        loader(others).load_state_dict(loader(names).state_dict())
    assert str(raised.value) == (
        f"The names of stages must be {', '.join(names) or 'none'}, as in the state, got {', '.join(others)}. "
        f"Pass the stages of the saved run: the random numbers of a stage depend on its name. {STRICT}"
    )


def test_state_of_another_rank_is_taken():
    def made(rank):
        sampler = DistributedSampler(DATA, num_replicas=2, rank=rank, seed=3)
        return loader(lambda: {"batch_size": 2, "sampler": sampler}, rank=rank)

    resumed = made(1)
    resumed.load_state_dict(stopped_at(2, made(0)))
    assert values(resumed) == values(made(1))[2:]


@pytest.mark.parametrize(("then", "now", "batch"), [((4, 1), (2, 1), 6), ((2, 2), (1, 4), 3), ((1, 1), (2, 2), 0)])
def test_other_number_of_ranks_goes_on_after_the_samples_that_were_had(then, now, batch):
    def made(ranks, size, rank=0):
        sampler = DistributedSampler(range(48), num_replicas=ranks, rank=rank, seed=3)
        return StreamedLoader(DataLoader(range(48), size, sampler=sampler), device="cpu", seed=7)

    state = stopped_at(3, made(*then))
    with pytest.raises(ArgumentError) as raised:
        made(*now).load_state_dict(state)
    assert f"The number of ranks must be {then[0]}, as in the state, got {now[0]}" in str(raised.value)
    rest = []
    for rank in range(now[0]):
        resumed = made(*now, rank)
        with pytest.warns(GpuAugWarning) as warned:
            resumed.load_state_dict(state, strict=False)
        text = str(warned[0].message)
        assert f"because the number of ranks was {then[0]} in the state and is {now[0]}" in text
        assert text.startswith(f"Batches from {batch} on differ from an uninterrupted run")
        rest += torch.cat(list(resumed)).tolist()
    had = {value for rank in range(then[0]) for each in values(made(*then, rank))[:3] for value in each}
    assert set(rest) >= set(range(48)) - had
    assert len(rest) == 48 - batch * now[0] * now[1]


OTHER_RUNS = {
    "seed must be 7, as in the state, got 8. Leave seed out to use the seed of the state.": {"seed": 8},
    "The wrapped loader's batch_size must be 2, as in the state, got 4. "
    "Create the loader with the settings of the saved run.": {"options": lambda: {"batch_size": 4}},
    "The wrapped loader's sampler must be BatchSampler of SequentialSampler, as in the state, got BatchSampler of Epochs. "
    "Create the loader with the settings of the saved run.": {"options": lambda: {"batch_size": 2, "sampler": Epochs()}},
    "The wrapped loader's generators must be none, as in the state, got loader. "
    "Create the loader with the settings of the saved run.": {"options": lambda: {"batch_size": 2, "generator": generator()}},
}


@pytest.mark.parametrize("text", OTHER_RUNS)
def test_what_differs_is_named_and_nothing_changes(text):
    given = dict(OTHER_RUNS[text])
    other = loader(given.pop("options", OPTIONS["in order"]), **given)
    iterator = iter(other)
    expected, before = next(iterator), saved(other.state_dict())
    with pytest.raises(ArgumentError) as raised:
        other.load_state_dict(stopped_at(2, loader(OPTIONS["in order"])))
    assert str(raised.value) == (f"{text} To resume with different batches, pass strict=False to load_state_dict.")
    assert repr(other.state_dict()) == repr(before)
    assert len(list(iterator)) == len(other) - 1, "the iterator goes on"
    assert expected is not None


DATASETS = {"map-style": range(24), "stream": Shards(), "stream with a state": Tape()}
OTHER_SETTINGS = {
    "batch_size must be 3, as in the state, got 4.": {"batch_size": 4},
    "drop_last must be False, as in the state, got True.": {"drop_last": True},
    "samples must be 24, as in the state, got 30.": {"dataset": range(30)},
    "sampler must be BatchSampler of SequentialSampler, as in the state, got BatchSampler of Epochs.": {"sampler": Epochs()},
    "generators must be none, as in the state, got loader.": {"generator": torch.Generator()},
}


@pytest.mark.parametrize("ended", [False, True], ids=["within an epoch", "at its end"])
@pytest.mark.parametrize(
    ("kind", "dataset", "text"),
    [
        (kind, dataset, text)
        for kind, dataset in [(DataLoader, "map-style"), *((StatefulDataLoader, dataset) for dataset in DATASETS)]
        for text, settings in OTHER_SETTINGS.items()
        if dataset == "map-style" or settings.keys() <= {"batch_size", "drop_last", "generator"}
    ],
)
def test_other_settings_of_any_data_loader_are_named(kind, dataset, text, ended):
    def made(**settings):
        return StreamedLoader(kind(**{"dataset": copy.deepcopy(DATASETS[dataset]), "batch_size": 3, **settings}), device="cpu")

    stopped = made()
    for number, _ in enumerate(stopped):
        if number == 1 and not ended:
            break
    state = saved(stopped.state_dict())
    other = made(**OTHER_SETTINGS[text])
    with pytest.raises(ArgumentError) as raised:
        other.load_state_dict(state)
    assert str(raised.value).startswith(f"The wrapped loader's {text}")
    with pytest.warns(GpuAugWarning, match="because the wrapped loader's "):
        other.load_state_dict(state, strict=False)
    same = made()
    same.load_state_dict(state)
    assert len(list(same)) == len(list(made())) - (0 if ended else 2)


def test_seed_that_was_given_stays_where_the_state_is_taken_as_it_is():
    other = loader(OPTIONS["in order"], seed=8)
    with pytest.warns(GpuAugWarning, match="seed was 7"):
        other.load_state_dict(stopped_at(2, loader(OPTIONS["in order"])), strict=False)
    assert other.seed == 8
    other.seed = 7
    with warnings.catch_warnings(action="error"):
        other.load_state_dict(stopped_at(2, loader(OPTIONS["in order"])))


SOURCE = {"settings": {"samples": SAMPLES}, "rank": 0, "epochs": {}, "generators": {}, "order": {"batches": 1}}


@pytest.mark.parametrize(
    "source",
    [
        None,
        {"next": 3},
        {**SOURCE, "rank": None},
        {**SOURCE, "order": 1},
        {**SOURCE, "order": {"batches": torch.zeros(3)}},
        {**SOURCE, "last": 1},
        {**SOURCE, "last": {**SOURCE, "generators": {"loader": torch.zeros(3)}}},
        {**SOURCE, "settings": {"samples": torch.zeros(3)}},
        {**SOURCE, "epochs": {"sampler": 1.5}},
        {**SOURCE, "epochs": {"sampler": 2**63}},
        {**SOURCE, "generators": {"loader": 3}},
        {**SOURCE, "generators": {"loader": torch.zeros(3)}},
        {key: SOURCE[key] for key in SOURCE if key != "epochs"},
    ],
)
def test_state_of_another_kind_of_loader_is_refused(source):
    made = loader(OPTIONS["one of two ranks"])
    before = repr(made.state_dict())
    state = {**stopped_at(2, loader(OPTIONS["one of two ranks"])), "source": source}
    for strict in (True, False):
        with pytest.raises(ArgumentError) as raised:
            made.load_state_dict(state, strict=strict)
        assert f"state['source'] must be the state of a DataLoader, got {shown(source)}" in str(raised.value)
    assert repr(made.state_dict()) == before


@pytest.mark.parametrize("batch_size", [0, -1, 2**62])
def test_batch_size_of_a_state_may_be_any_number(batch_size):
    state = stopped_at(2, loader(OPTIONS["in order"]))
    state["source"]["settings"]["batch_size"] = batch_size
    resumed = loader(OPTIONS["in order"])
    with pytest.warns(GpuAugWarning, match="batch_size was"):
        resumed.load_state_dict(state, strict=False)
    assert len(list(resumed)) == (0 if batch_size > 0 else len(resumed) - 2)
