"""Target dicts between the stages of a loader: packed where stages take them so, and dicts for everyone else."""

import functools

import pytest
import torch
from support.feed.ring_equality import assert_same
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug
from gpuaug.core.packed_targets import pack_targets
from gpuaug.core.targets import PackedTargets
from gpuaug.loader.inspection import Inspection
from gpuaug.profiler import isolated
from gpuaug.viewer.trace import trace_batch

HEIGHT, WIDTH = 24, 32
AUGMENT = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop((12, 16)), v2.SanitizeBoundingBoxes()])
ON = {0: "input", 1: "targets"}


def batch_of(number, typed):
    draw = torch.Generator().manual_seed(number)
    records = []
    for sample in range(6):
        corners = torch.rand(sample % 4, 2, generator=draw) * 20
        boxes = torch.cat((corners, corners + 5), 1)
        if typed:
            boxes = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(HEIGHT, WIDTH))
        records.append({"boxes": boxes, "labels": torch.arange(len(boxes)), "image_id": sample})
    return torch.zeros(6, 3, HEIGHT, WIDTH, dtype=torch.uint8), records


def batches(packed, typed):
    made = [batch_of(number, typed) for number in range(4)]
    return [pack_targets(batch, lambda shape, dtype: None) for batch in made] if packed else made


def streamed(stages, *, packed=True, typed=True, depth=2):
    with gpuaug.StreamedLoader(batches(packed, typed), stages, device="cpu", seed=3, depth=depth) as loader:
        return list(loader)


def augment(typed):
    return gpuaug.TransformStage(gpuaug.fuse(AUGMENT), **({} if typed else {"on": ON}), name="augment")


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_stage_that_drops_boxes_gives_what_sanitize_gives_in_the_loop(typed, depth):
    stages = [augment(typed), gpuaug.TransformStage(gpuaug.sanitize, on=1)]
    want = [[images, gpuaug.sanitize(records)] for images, records in streamed([augment(typed)], packed=False, typed=typed)]
    assert sum(len(record["labels"]) for _, records in want for record in records) < 4 * 7
    for packed in (True, False):
        got = streamed(stages, packed=packed, typed=typed, depth=depth)
        assert_same([list(batch) for batch in got], want)


@pytest.mark.parametrize("on", [..., 0, -1, (1, 8), None])
@pytest.mark.parametrize("takes_packed", [False, True])
def test_elements_of_a_batch_that_is_a_list_of_dicts_are_members(on, takes_packed):
    records = [{"boxes": torch.full((n, 4), n), "labels": torch.arange(n)} for n in range(9)]
    seen = []

    def transform(*values):
        seen.extend(values)
        return values if len(values) > 1 else values[0]

    transform.takes_packed = takes_packed
    batch = pack_targets(records, lambda shape, dtype: None)
    (got,) = gpuaug.StreamedLoader([batch], [gpuaug.TransformStage(transform, on=on)], device="cpu")
    assert_same(got, records)
    selected = (0,) if on is ... else on if isinstance(on, tuple) else (on,)
    assert_same(seen, [records] if on is None else [records[index] for index in selected])


class Seen:
    """A transform that remembers the types of what it got."""

    def __init__(self):
        self.types = []

    def __call__(self, value):
        self.types.append((type(value), frozenset(map(type, value)) if type(value) is list else ()))
        return value


@pytest.mark.parametrize("dropping", [gpuaug.sanitize, functools.partial(gpuaug.sanitize, per_box=["boxes", "labels"])])
def test_dicts_are_unpacked_for_stages_that_read_them(monkeypatch, dropping):
    unpacked = []
    once = PackedTargets.unpacked
    monkeypatch.setattr(PackedTargets, "unpacked", lambda targets: unpacked.append(targets) or once(targets))
    images, before, after, whole = Seen(), Seen(), Seen(), Seen()
    of_boxes = gpuaug.TransformStage(dropping, on=1, name="drop")
    stages = [gpuaug.TransformStage(images, on=0), augment(True), of_boxes]
    streamed(stages)
    checks_of_first_batch = 1 + len(stages)
    assert len(unpacked) == 4 + checks_of_first_batch
    assert images.types == [(torch.Tensor, ())] * 4
    stages = [gpuaug.TransformStage(before, on=1), augment(True), of_boxes, gpuaug.TransformStage(after, on=1)]
    made = streamed([*stages, gpuaug.TransformStage(whole, on=None)])
    assert before.types == after.types == [(list, {dict})] * 4
    assert whole.types == [(tuple, ())] * 4
    want = [[images, gpuaug.sanitize(records)] for images, records in streamed([augment(True)])]
    assert_same([list(batch) for batch in made], want)


def test_host_waits_for_the_device_before_it_reads_the_number_of_boxes(monkeypatch):
    order = []
    counts = gpuaug.core.targets.PendingRows.counts
    monkeypatch.setattr(gpuaug.core.targets.PendingRows, "counts", lambda rows: order.append("read") or counts(rows))
    passed = gpuaug.core.streams.Event
    monkeypatch.setattr(passed, "synchronize", lambda _: order.append("wait"))
    streamed([augment(True), gpuaug.TransformStage(gpuaug.sanitize, on=1)])
    reads = [at for at, what in enumerate(order) if what == "read"]
    first_reads = [at for at in reads if order[at - 1] != "read"]
    assert len(first_reads) == 4
    assert all(order[at - 1] == "wait" for at in first_reads)


def test_stages_that_do_not_read_the_dicts_do_not_make_the_host_wait(monkeypatch):
    waits, before_launch = [], []
    passed = gpuaug.core.streams.Event
    monkeypatch.setattr(passed, "synchronize", lambda _: waits.append("wait"))
    drop = gpuaug.TransformStage(gpuaug.sanitize, on=1, name="drop")
    add_one = gpuaug.TransformStage(lambda images: before_launch.append(len(waits)) or images + 1, on=0)
    got = streamed([augment(True), drop, add_one], depth=0)
    # The first batch is checked whole; each of the others is waited for when it is handed over, after its launch.
    assert before_launch == [1, 1, 2, 3]
    want = [[images + 1, gpuaug.sanitize(records)] for images, records in streamed([augment(True)])]
    assert_same([list(batch) for batch in got], want)


def test_parts_are_measured_and_samples_shown_with_packed_dicts():
    batch = batches(packed=True, typed=True)[0]
    dicts = Seen()
    stages = [augment(True), gpuaug.TransformStage(gpuaug.sanitize, on=1, name="drop"), gpuaug.TransformStage(dicts, on=1)]
    loader = gpuaug.StreamedLoader([batch], stages, device="cpu", seed=3)
    parts = list(isolated.measure_parts(Inspection(loader), batch, lambda: None))
    assert [part.name for part in parts] == ["copy", "stage/augment", "stage/drop", "stage/transform", "step"]
    assert set(dicts.types) == {(list, frozenset({dict}))}
    trace = trace_batch(loader)
    (got,) = list(gpuaug.StreamedLoader([batch], stages[:2], device="cpu", seed=3))
    assert_same([record["labels"].tolist() for record in trace.states[-1][1]], [record["labels"].tolist() for record in got[1]])
