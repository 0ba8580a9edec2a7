"""Rows made for several batches at once are those that each batch would have made, and no generator notices."""

import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from support import internals
from support.batches.pairwise import sweep
from support.comparison.replay import photographs
from support.comparison.values import assert_values
from support.ops.pipelines import CLOSE, EXACT, MEAN, RGB_CLOSE, RGB_EXACT, STD, TIES, by_the_batch
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms import v2

import gpuaug
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.table import ahead, rows
from gpuaug.fusion.table.ahead import TablePrefetch
from gpuaug.fusion.table.on_host import HostTables
from gpuaug.fusion.table.rows import UpcomingBatches

SHARED = {
    "same": lambda: [
        K.RandomResizedCrop((16, 20), scale=(0.5, 2.0), same_on_batch=True),
        K.RandomHorizontalFlip(same_on_batch=True),
        K.ColorJitter(0.4, 0.4, 0.4, 0.1, same_on_batch=True),
        K.RandomPerspective(0.4, same_on_batch=True),
    ],
    "misses": lambda: [K.RandomResizedCrop((16, 20), scale=(0.6, 1.6)), K.RandomErasing(ratio=(0.2, 1.5), p=0.9)],
    "torchvision's policies": lambda: [
        v2.RandomResizedCrop((16, 20)),
        v2.RandAugment(),
        v2.RandomApply([v2.AutoAugment()]),
        v2.ToDtype(torch.float32, True),
    ],
    "Kornia's policies": lambda: [K.RandomResizedCrop((16, 20)), K.auto.RandAugment(2, 9), K.auto.AutoAugment()],
    "Kornia's policies, by sample": lambda: [K.auto.TrivialAugment(), K.auto.RandAugment(3, 9), K.auto.AutoAugment()],
    "whole batches": lambda: [
        K.RandomRotation(30.0, p=1.0),
        K.RandomPosterize(p=0.5),
        by_the_batch(K.RandomAffine(9.0, p=0.7)),
    ],
}
PIPELINES = {**EXACT, **RGB_EXACT, **CLOSE, **RGB_CLOSE, **TIES, **SHARED}
SEEDS = (5, 2**63 - 1, 0, 17, 18)


def fused(name):
    return gpuaug.fuse(PIPELINES[name](), pick="sample" if "by sample" in name else "batch")


def simple():
    return [K.RandomResizedCrop((16, 20)), K.RandomHorizontalFlip(), K.ColorJitter(0.4, 0.4, 0.4), K.Normalize(MEAN, STD)]


def draw_tables(planned, size, seeds, device, *, points):
    """Tables of one batch per seed, (batches, B, K)."""
    tables = HostTables(UpcomingBatches(planned, size, seeds, 1, device, points))
    return torch.stack([tables.table(index, size) for index in range(len(seeds))])


@pytest.fixture
def blocks(monkeypatch):
    """For how many batches rows were made, each time that they were."""
    made = []

    def counted(upcoming, *size_dependent):
        made.append(len(upcoming.seeds))
        return HostTables(upcoming, *size_dependent)

    monkeypatch.setattr(ahead, "HostTables", counted)
    return made


@pytest.mark.parametrize(("name", "points"), sweep(PIPELINES, [False, True]))
@pytest.mark.every(3)
def test_tables_drawn_together_equal_tables_drawn_one_by_one(monkeypatch, name, points):
    """Also where the columns of a table lie together in memory."""
    augment, size = fused(name), Size(9, 3, 30, 41)
    segment = internals.program(augment).segments.at(0, size, masks=False)
    planned = segment.plan
    if planned is None or planned.draws_one_batch_at_a_time:
        pytest.skip("draws alone")
    host = torch.device("cpu")
    draw = partial(draw_tables, planned, size, device=host, points=points)
    expected = draw(SEEDS)
    for seed, table in zip(SEEDS, expected, strict=True):
        assert_values(table, draw((seed,))[0])

    def by_column(samples, width, fill, device):
        numbers = np.empty((width, samples), np.float32)
        fill(numbers.T)
        return torch.from_numpy(numbers.T.copy())

    monkeypatch.setattr(rows, "table_on_device", by_column)
    assert_values(draw(SEEDS), expected, about="by column")


def sent(monkeypatch, name, device, *, points, by_column_from):
    """The rows of five batches of ``PIPELINES[name]``, sent to a device; ``None`` where each draws alone."""
    augment, size = fused(name), Size(9, 3, 30, 41)
    segment = internals.program(augment).segments.at(0, size, masks=False)
    if segment.plan is None or segment.plan.draws_one_batch_at_a_time:
        return None
    monkeypatch.setattr(rows, "BY_COLUMN_FROM", by_column_from)
    return draw_tables(segment.plan, size, SEEDS, torch.device(device), points=points)


@pytest.mark.gpu
@pytest.mark.parametrize("points", [False, True])
def test_rows_written_by_column_are_the_same(monkeypatch, points):
    for name in PIPELINES:
        expected = sent(monkeypatch, name, "cpu", points=points, by_column_from=1)
        if expected is None:
            continue
        got = sent(monkeypatch, name, "cuda", points=points, by_column_from=1)
        assert got.stride() == expected.stride(), name
        assert_values(got.cpu(), expected, about=name)
        assert_values(sent(monkeypatch, name, "cuda", points=points, by_column_from=46).cpu(), expected, about=name)


def test_draws_one_batch_at_a_time_is_set_for_mixes_and_noise():
    for name in PIPELINES:
        planned = internals.program(fused(name)).segments.whole_plan(Size(9, 3, 30, 41), masks=False, views=1)
        assert planned.draws_one_batch_at_a_time == (name.startswith("noise") or "mix" in name or name == "mosaic"), name


def test_prefetched_tables_give_what_their_seed_gives(blocks):
    augment, images = gpuaug.fuse(simple()), photographs(5, 3, 30, 41)
    torch.manual_seed(3)
    seeds = [int(torch.randint(0, 2**63 - 1, ()).item()) for _ in range(33)]
    torch.manual_seed(3)
    for seed in seeds:
        expected = augment(images, draws=augment.draw(images.shape, seed=seed))
        assert_values(augment(images), expected)
    assert blocks == [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize(("views", "share", "expected"), [(1, 2, [1, 2, 2, 2, 2]), (2, 8, [2, 4, 8, 8])])  # rows of both views
def test_prefetch_is_limited_by_samples(blocks, views, share, expected):
    augment, images = gpuaug.fuse(K.RandomHorizontalFlip(), views=views), torch.zeros(ahead.MOST_SAMPLES // share, 1, 2, 2)
    for _ in range(8):
        augment(images)
    assert blocks == expected


def test_prefetch_survives_other_draws_and_changing_sizes(blocks):
    augment = gpuaug.fuse(simple())
    batches = [photographs(count, 3, *sides) for count, sides in ((5, (30, 41)), (3, (30, 41)), (5, (24, 24)), (0, (30, 41)))]
    chance = random.Random(1)
    torch.manual_seed(0)
    for _ in range(60):
        images = chance.choice(batches) if chance.random() < 0.3 else batches[0]
        if chance.random() < 0.2:
            torch.rand(chance.randrange(4))
        state = torch.get_rng_state()
        seed = int(torch.randint(0, 2**63 - 1, ()).item())
        torch.set_rng_state(state)
        assert_values(augment(images), augment(images, draws=augment.draw(images.shape, seed=seed)))
    assert max(blocks) > 8


def test_reseeding_before_each_call_prefetches_nothing(blocks):
    augment, images = gpuaug.fuse(simple()), photographs(2, 3, 30, 41)
    for seed in range(12):
        torch.manual_seed(seed)
        augment(images)
    assert blocks == [1] * 12


def test_prefetched_tables_stay_with_their_stream(blocks, monkeypatch):
    augment, images, current = gpuaug.fuse(simple()), photographs(2, 3, 30, 41), [7]
    monkeypatch.setattr(ahead, "current_stream", lambda device: current[0])
    for _ in range(3):
        augment(images)
    assert blocks == [1, 2]
    current[0] = 8
    augment(images)
    assert blocks == [1, 2, 1]


def test_threads_may_draw_from_one_pipeline_at_once():
    augment, images = gpuaug.fuse(simple()), photographs(3, 3, 30, 41)

    def run(seed):
        torch.manual_seed(seed)  # the generator is the process's, so only the shape of the results can be told
        return {augment(images).shape for _ in range(30)}

    with ThreadPoolExecutor(4) as pool:
        assert set().union(*pool.map(run, range(4))) == {torch.Size((3, 3, 16, 20))}


@pytest.mark.parametrize("calls", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_prefetch_in_a_loader_draws_the_next_batches(blocks, calls):
    images = photographs(50, 3, 30, 41)
    augment = gpuaug.fuse(simple())
    stage = gpuaug.TransformStage(lambda batch: torch.stack([augment(batch) for _ in range(calls)]), on=0, name="views")

    def epochs(depth):
        loader = gpuaug.StreamedLoader(DataLoader(TensorDataset(images), 2), [stage], device="cpu", depth=depth, seed=4)
        return [batch for _ in range(2) for (batch,) in loader]

    expected = epochs(0)
    # 25 batches an epoch: rows for 1, 2, 4, 8 and 10 of them, and six for batches that never come.
    assert blocks == [count for count in (1, 2, 4, 8, 16) for _ in range(calls)] * 2
    assert len({tuple(views.flatten(1)[:, :50].flatten().tolist()) for views in expected}) == 50
    for views in expected:
        assert len({tuple(view.flatten()[:200].tolist()) for view in views}) == calls
    for other in epochs(2), epochs(1):
        for one, two in zip(expected, other, strict=True):
            assert_values(one, two)


def test_fused_stage_draws_depend_on_seed_epoch_rank_and_stage_name():
    images = photographs(8, 3, 30, 41)
    augment = gpuaug.fuse(simple())

    def epoch(*, seed=4, number=2, rank=1, name="augment"):
        stage = gpuaug.TransformStage(augment, on=0, name=name)
        loader = gpuaug.StreamedLoader(DataLoader(TensorDataset(images), 2), [stage], device="cpu", seed=seed, rank=rank)
        loader.set_epoch(number)
        return torch.cat([batch for (batch,) in loader])

    assert_values(epoch(), epoch())
    for changed in ({"seed": 5}, {"number": 3}, {"rank": 0}, {"name": "other"}):
        assert not torch.equal(epoch(), epoch(**changed)), changed


def test_prefetched_tables_without_points_are_not_used_for_points():
    augment, images, points = gpuaug.fuse(simple()), photographs(4, 3, 30, 41), torch.rand(4, 5, 2) * 30
    torch.manual_seed(2)
    got = [augment(images, *given, data_keys=["input", "keypoints"][: 1 + len(given)]) for given in [(), (), (points,)] * 8]
    torch.manual_seed(2)
    for number, made in enumerate(got):
        draws = augment.draw(images.shape)
        expected = augment(images, points, data_keys=["input", "keypoints"], draws=draws)
        for one, other in zip(made, expected, strict=True) if number % 3 == 2 else [(made, expected[0])]:
            assert_values(one, other)


@pytest.mark.parametrize("ragged", [False, True])
def test_default_device_does_not_change_draws(ragged):
    augment, images = gpuaug.fuse(simple(), ragged=ragged), list(photographs(3))
    images = gpuaug.collate_ragged(images) if ragged else torch.stack(images)
    boxes = [{"boxes": torch.tensor([[1.0, 2, 9, 9]])} for _ in range(3)]

    def several():
        torch.manual_seed(4)
        return [augment(images, boxes, data_keys=["input", "targets"]) for _ in range(4)]

    expected = several()
    with torch.device("meta"):
        got = several()
    for (made, records), (other, known) in zip(got, expected, strict=True):
        assert_values(made, other)
        for one, two in zip(records, known, strict=True):
            assert_values(one["boxes"], two["boxes"])


@pytest.mark.parametrize("points", [False, True])
def test_tables_for_a_gpu_equal_those_for_a_cpu(monkeypatch, points):
    table_on_device = rows.table_on_device
    monkeypatch.setattr(
        rows, "table_on_device", lambda samples, width, fill, device: table_on_device(samples, width, fill, torch.device("cpu"))
    )
    monkeypatch.setattr(ahead, "current_stream", lambda device: 0)
    augment, size = gpuaug.fuse(simple()), Size(4, 3, 30, 41)
    segment = internals.program(augment).segments.at(0, size, masks=False)

    def calls(device):
        torch.manual_seed(3)
        made = TablePrefetch()
        batches = [made.tables(segment.plan, size, torch.device(device), has_points=points, views=1) for _ in range(6)]
        return [tables.table(index, size, None) for tables, index in batches]

    for one, other in zip(calls("cuda:0"), calls("cpu"), strict=True):
        assert_values(one, other)
