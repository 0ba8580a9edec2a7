"""The contract for encoders with several inputs and structured results, on buckets of shapes, from graphs and eager."""

import gc
from collections import Counter

import pytest
import torch
from contract.sources import DEPTHS, Opened, OwnError, streamed
from contract.test_leaving import WAYS_TO_LEAVE
from support.comparison.values import assert_values
from support.files.encoded import encoded
from support.gpu.cuda_encoders import graphs_of
from support.gpu.encoder_cases import CASES, IMAGES, SHAPES, by_hand, encoders, source, stages, tensors
from support.gpu.host_graphs import install, on_lanes
from support.public.torch_settings import default_dtype

from gpuaug import DecodeStage, TransformStage, collate_encoded
from gpuaug.core import batch as batches

DRAWN = "model output, drawn from"
ALL_CASES = pytest.mark.parametrize("case", CASES)
AHEAD_OR_NOT = pytest.mark.parametrize("depth", [0, 2])


@pytest.fixture(autouse=True)
def forms(monkeypatch):
    return install(monkeypatch)


def loader_of(case=DRAWN, depth=2, *, data=None, modules=None, graph_bytes=None, **options):
    made = stages(case, modules, graph_bytes=graph_bytes)
    return on_lanes(source() if data is None else data, *made, depth=depth, seed=5, **options)


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        for x, y in zip(a, b, strict=True):
            assert_values(x, y)


def all_tensors(loader):
    return [tensors(batch) for batch in loader]


# 1 and 2. Complete, in order, and equal to the reference


def replays(name, left_out=()):
    shapes = Counter(batch[name].shape for batch in source() if batch[name].shape not in left_out)
    return sum(count - 1 for count in shapes.values())


REPLAYS = {
    None: replays("image") + replays("ids"),
    12000: replays("image", left_out=[IMAGES["tall"]]) + replays("ids"),
    0: replays("ids"),
}
"""By bytes of the images' graphs: for all of them, for one, and for none."""


@pytest.mark.filterwarnings("ignore:Some shapes of stage 'vae' run without CUDA graphs")
@pytest.mark.parametrize(
    ("case", "graph_bytes", "depth"),
    [
        *((case, None, depth) for case in CASES for depth in (DEPTHS if case == DRAWN else (1, 5))),
        *[(DRAWN, 0, 1), (DRAWN, 0, 50), (DRAWN, 12000, 0), (DRAWN, 12000, 2)],
    ],
)
def test_batches_are_complete_equal_to_the_reference_and_of_the_same_form(case, depth, graph_bytes, forms):
    reference, loader = (loader_of(case, each, graph_bytes=graph_bytes) for each in (0, depth))
    for leave_at in (2, len(SHAPES), len(SHAPES)):
        given = []
        for each in (reference, loader):
            forms.clear()
            got = []
            for batch in each:
                got.append(tensors(batch))
                assert batch["number"] == len(got) - 1
                if len(got) == leave_at:
                    break
            given.append((got, [form for form in forms if form[0] == "replayed"]))
        assert_same(given[0][0], given[1][0])
        if leave_at == len(SHAPES):
            assert given[0][1] == given[1][1]
            assert len(given[0][1]) == REPLAYS[graph_bytes]


# 4. Yours to keep


@ALL_CASES
def test_batches_that_are_kept_do_not_change_and_share_no_memory(case):
    modules = encoders(case)
    loader = loader_of(case, modules=modules)
    kept, copies, addresses = [], [], set()
    for batch in loader:
        kept.append(batch)
        copies.append(tensors(batch))
        own = {tensor.untyped_storage().data_ptr() for tensor in batches.tensors([batch["latents"], batch["text"]])}
        assert not own & addresses
        addresses |= own
    for stage, module in zip(loader.stages, modules, strict=True):
        with stage.update():
            for tensor in (*module.parameters(), module.table):
                tensor.zero_()
    list(loader)
    assert_same([tensors(batch) for batch in kept], copies)


# 7. Failures arrive where they belong


@ALL_CASES
@AHEAD_OR_NOT
def test_an_error_arrives_at_its_batch_after_the_others(case, depth):
    modules = encoders(case)
    loader = loader_of(case, depth, modules=modules)
    modules[0].fails_at = (4, 3, 8, 8)
    for _ in range(2):
        iterator, arrived = iter(loader), []
        with pytest.raises(ZeroDivisionError, match="planted") as caught:
            arrived.extend(next(iterator)["number"] for _ in SHAPES)
        assert len(arrived) in (0, 7), "a list that fails keeps nothing"
        assert "stage 'vae', at batch 7" in caught.value.__notes__[0]
    modules[0].fails_at = None
    assert len(list(loader)) == len(SHAPES)


# 8. Leaving early is clean


@pytest.mark.parametrize(("leave", "depth"), [*((leave, 2) for leave in WAYS_TO_LEAVE), (WAYS_TO_LEAVE[0], 0)])
def test_a_loop_that_is_left_leaves_no_thread_and_changes_no_later_epoch(leave, depth, feeds):
    want = all_tensors(loader_of(depth=0))
    loader = loader_of(depth=depth)
    gc.disable()
    try:
        leave(loader)
        assert not feeds()
    finally:
        gc.enable()
    loader.set_epoch(0)
    assert_same(all_tensors(loader), want)


@ALL_CASES
def test_two_iterators_do_not_disturb_one_another(case):
    one_by_one, at_once = loader_of(case), loader_of(case)
    want = [all_tensors(one_by_one) for _ in range(2)]
    got = [[], []]
    for pair in zip(at_once, at_once, strict=True):
        for batch, epoch in zip(pair, got, strict=True):
            epoch.append(tensors(batch))
    assert_same(got[0], want[0])
    assert_same(got[1], want[1])


def test_graphs_go_with_their_loader():
    loader = loader_of()
    list(loader)
    stage = loader.stages[0]
    assert len(stage._bound_features) == 1
    del loader
    gc.collect()
    assert len(stage._bound_features) == 0


# 9 and 10. Randomness is keyed, and resume is exact


@AHEAD_OR_NOT
def test_the_users_generator_is_as_if_no_stage_had_run(depth):
    torch.manual_seed(3)
    want = torch.rand(len(SHAPES))
    torch.manual_seed(3)
    assert_values(torch.stack([torch.rand(()) for _ in loader_of(depth=depth)]), want)


@pytest.mark.parametrize("depth", [0, 2, 50])
def test_resume_is_exact(depth):
    whole = all_tensors(loader_of(depth=depth))
    for stop in (1, 4, 8):
        loader = loader_of(depth=depth)
        iterator = iter(loader)
        for _ in range(stop):
            next(iterator)
        resumed = loader_of(depth=depth)
        resumed.load_state_dict(loader.state_dict())
        assert_same(all_tensors(resumed), whole[stop:])


# 11. Thread-local state is the consumer's


def thread_state():
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "default dtype": torch.get_default_dtype(),
    }


CONSUMERS = {
    "plain": torch.enable_grad,
    "without grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "other default dtype": lambda: default_dtype(torch.float64),
}


@pytest.mark.parametrize("consumer", CONSUMERS)
@AHEAD_OR_NOT
def test_encoders_see_the_state_of_the_training_thread_and_leave_it(consumer, depth):
    seen = []

    def seeing(encoded):
        seen.append(thread_state())
        if len(seen) == 6:
            raise OwnError(7, text="")
        return sampled_with_grad(encoded)

    def sampled_with_grad(encoded):
        torch.set_grad_enabled(True)  # as some encoders do; the stage's own block ends with it
        return encoded.latent_dist.mean * 2

    made = stages("model output")
    made[0].output = seeing
    with CONSUMERS[consumer]():
        before = thread_state()
        iterator = iter(on_lanes(source(), *made, depth=depth, seed=5))
        for batch in (next(iterator), next(iterator)):
            assert not any(tensor.requires_grad for tensor in batches.tensors(batch))
            assert thread_state() == before
        with pytest.raises(OwnError):
            list(iterator)
        assert thread_state() == before
    assert seen[0] == {**before, "grad": False}


# 12. Encoders may move within update()


@pytest.mark.parametrize("moved", [False, True])
@AHEAD_OR_NOT
def test_update_changes_the_encoder_of_its_stage_alone(depth, moved, forms):
    modules = encoders("dict, by key")
    loader = loader_of("dict, by key", depth, modules=modules)
    list(loader)
    before = len(forms)
    with loader.stages[0].update():
        if moved:
            modules[0].scale.data = torch.tensor([6.0])
        else:
            modules[0].scale.fill_(6.0)
    for batch, host in zip(loader, source(), strict=True):
        latents, text = by_hand("dict, by key", host, modules)
        assert_same([tensors(batch["latents"]), tensors(batch["text"])], [tensors(latents), tensors(text)])
    captured = [form for form, _ in forms[before:]].count("captured")
    assert captured == (2 if moved else 0), "the graphs of the other stage stay"
    assert graphs_of(loader) == [2, 2], "the former graphs of this one do not"


# 13 and 15. The same on a CPU, and the same as the encoder's own


def assert_of_the_same_form(got, want):
    assert type(got) is type(want)
    if isinstance(got, torch.Tensor):
        assert_values(got, want)
    elif batches.is_container(got):
        assert batches.member_names(got) == batches.member_names(want)
        for name in batches.member_names(got):
            assert_of_the_same_form(batches.member(got, name), batches.member(want, name))
    else:
        assert got == want


@pytest.mark.parametrize("case", [case for case in CASES if case != DRAWN])
@pytest.mark.parametrize("device", ["CPU", "lanes"])
def test_results_have_the_types_members_and_values_of_the_encoders_own(case, device):
    loader = loader_of(case) if device == "lanes" else streamed(source(), *stages(case), seed=5)
    for batch, host in zip(loader, source(), strict=True):
        latents, text = by_hand(case, host)
        if case == "dict, with memory of the module":  # Parameters arrive as tensors
            latents, text = (batches.map_leaves(lambda leaf: leaf.detach(), result) for result in (latents, text))
        assert_of_the_same_form(batch["latents"], latents)
        assert_of_the_same_form(batch["text"], text)
        assert_values(batch["image"], host["image"])


def test_draws_on_a_cpu_are_those_of_lanes():
    assert_same(all_tensors(streamed(source(), *stages(DRAWN), seed=5)), all_tensors(loader_of(depth=2)))


# 14. Not a DataLoader in disguise


def test_nothing_starts_before_the_first_batch_is_asked_for_although_graphs_are_captured(feeds, forms):
    made = stages(DRAWN)
    made[0].capture([(4, 3, 8, 12)])
    wrapped = Opened(source())
    loader = on_lanes(wrapped, *made, seed=5)
    made[1].capture([[torch.empty(4, 5, dtype=torch.int64)] * 2])
    assert forms == [("captured", 4)] * 2
    iterator = iter(loader)
    assert len(loader) == len(SHAPES)
    assert (wrapped.opened, feeds()) == (0, [])
    next(iterator)
    assert wrapped.opened == 1
    iterator.close()


# 16. One decoder per file


def test_features_of_files_are_those_of_each_file_alone_at_every_depth():
    sizes = [(32, 16), (16, 32), (32, 16), (32, 16), (16, 32)]
    files = [[encoded(*size, seed=2 * number + index) for index in range(2)] for number, size in enumerate(sizes)]
    case = "dict, by key"
    (stage, _), modules = stages(case), encoders(case)
    decode = DecodeStage(backend="cpu")
    for depth in (0, 2, 50):
        dense = TransformStage(lambda ragged: torch.stack(list(ragged)).float(), on="image")
        data = [{"image": collate_encoded(batch)} for batch in files]
        loader = streamed(data, DecodeStage(on="image", backend="cpu"), dense, stage, depth=depth)
        for _ in range(2):
            for batch, originals in zip(loader, files, strict=True):
                alone = torch.stack([decode(collate_encoded([file]), "cpu")[0] for file in originals]).float()
                want = modules[0].eval().encode(alone)["states"]
                assert_same([tensors(batch["latents"])], [tensors(want)])
