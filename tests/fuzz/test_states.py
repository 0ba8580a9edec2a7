"""A damaged state is loaded, or refused with an error of gpuaug, and a loader that refuses it is as it was."""

import copy
import math

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from support.files.encoded import encoded
from support.public.fuzzing import cases, outcome
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import gpuaug

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore:Batches from:gpuaug.GpuAugWarning"),
]

BATCHES = 4
VALUES = st.sampled_from(
    [None, True, 0, 1, -1, 3, 2**31, 2**64, 10**40, 0.5, math.nan, math.inf, "", "x", "\ud800", b"x", [], [1], {}, {"a": 1}, ()]
) | st.builds(torch.zeros, st.sampled_from([(), (0,), (3,), (5056,)]), dtype=st.sampled_from([torch.uint8, torch.float32]))


def noise(batch):
    return batch + torch.rand_like(batch)


def plain_list():
    return gpuaug.StreamedLoader([torch.ones(2)] * BATCHES, [noise], device="cpu")


def shuffled():
    dataset = TensorDataset(torch.arange(2.0 * BATCHES))
    loader = DataLoader(dataset, 2, shuffle=True, generator=torch.Generator().manual_seed(5))
    return gpuaug.StreamedLoader(loader, [gpuaug.TransformStage(noise, on=0)], device="cpu")


def sampled():
    dataset = TensorDataset(torch.arange(2.0 * BATCHES))
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(5))
    return gpuaug.StreamedLoader(DataLoader(dataset, 2, sampler=sampler), device="cpu", depth=0)


def decoded():
    batch = gpuaug.collate_encoded([encoded(8, 6, "BMP"), b"no image"])
    stage = gpuaug.DecodeStage(on_error="replace", max_replaced=1, backend="cpu", threads=1)
    return gpuaug.StreamedLoader([batch] * BATCHES, [stage], device="cpu")


LOADERS = [plain_list, shuffled, sampled, decoded]


def places(value, path=()):
    """Paths of all values in a state."""
    yield path
    if isinstance(value, dict):
        for key, inside in value.items():
            yield from places(inside, (*path, key))


def changed(state, path, change):
    state = copy.deepcopy(state)
    if not path:
        return change[1] if change[0] == "value" else {}
    inside = state
    for key in path[:-1]:
        inside = inside[key]
    if change[0] == "value":
        inside[path[-1]] = change[1]
    elif change[0] == "missing":
        del inside[path[-1]]
    else:
        inside[change[1]] = inside.pop(path[-1])
    return state


CHANGES = st.tuples(st.just("value"), VALUES) | st.just(("missing", None)) | st.tuples(st.just("name"), st.text(max_size=2))


@pytest.mark.parametrize("key", ["last", "epochs", "generators", "settings", "rank"])
@pytest.mark.parametrize("value", [torch.zeros(()), torch.zeros(3), None, "x"], ids=str)
def test_another_type_in_the_state_of_a_dataloader_is_refused(key, value):
    state = shuffled().state_dict()
    state["source"][key] = value
    with pytest.raises((gpuaug.ArgumentError, gpuaug.ArgumentTypeError)):
        shuffled().load_state_dict(state)


def read(loader):
    """The number of batches of the rest of an epoch, and of the next epoch."""
    return [sum(1 for _ in loader) for _ in range(2)]


@cases(60)
@given(st.sampled_from(LOADERS), st.integers(0, BATCHES), st.booleans(), st.booleans(), st.data())
def test_a_damaged_state_is_loaded_or_refused(make, stop, ended, strict, data):
    saved = make()
    for number, _ in enumerate(saved, start=1):
        if number == stop and not ended:
            break
    state = saved.state_dict()
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(sorted(places(state), key=str)))
        state = changed(state, path, data.draw(CHANGES))
        if not isinstance(state, dict):
            break
    loader = make()
    next(iter(loader))
    before = loader.state_dict()
    made = outcome(loader.load_state_dict, state, strict=strict)
    event(type(made).__name__)
    if isinstance(made, gpuaug.ArgumentError | gpuaug.ArgumentTypeError):
        assert str(loader.state_dict()) == str(before)
        assert read(loader)[0] in (BATCHES - 1, BATCHES)
    elif made is None:
        made = outcome(read, loader)
        event(f"read: {type(made).__name__}")
        if isinstance(made, list):
            assert made[1] == BATCHES
