import itertools
import json

import pytest
import torch
from support.comparison.replay import left_to_kornia

from bench.harness import call_rows, flags, optional_rows, run
from bench.peers import augmenters
from bench.suites import SUITES
from bench.suites.augmentation import augment
from gpuaug.benchkit import results

pytestmark = left_to_kornia  # RandAugment as its users have it, equalize and auto_contrast included


TINY = ["--device", "cpu", "--size", "32", "--batch", "2", "--seconds", "0.02", "--repeats", "1"]
EVERYWHERE = {"torchvision v2", "Kornia", "Kornia, matrices skipped", "gpuaug"}
CASES = ("seed", "cls", "ssl", "masks", "randaugment")


@pytest.fixture
def without_peers(monkeypatch):
    """Neither of the libraries that this environment may or may not have."""

    def missing(*_):
        raise optional_rows.MissingError("not installed: here for the test")

    augmenters_by_row = augmenters.AUGMENTERS | {"fuse-augmentations": missing, "DALI": missing}
    monkeypatch.setattr(augmenters, "AUGMENTERS", augmenters_by_row)


def test_has_every_row_of_every_case_and_says_what_was_skipped(without_peers, tmp_path, capsys):
    path = tmp_path / "augment.json"
    result = augment.main([*TINY, "--quick", "--json", str(path)])
    assert json.loads(path.read_text())["rows"] == json.loads(json.dumps(result["rows"]))
    results.check(json.loads(path.read_text()))
    for case in CASES:
        case_rows = {"seed": {"torchvision loop"}, "cls": {"gpuaug, streamed"}}.get(case, set())
        case_rows |= {"gpuaug, antialiased"} if case in ("seed", "cls", "ssl") else set()
        case_rows |= {"gpuaug, from torchvision"}
        by_name = {row["name"]: row for row in result["rows"] if row["case"] == case}
        assert set(by_name) == EVERYWHERE | case_rows
        assert by_name["gpuaug"]["gpuaug_over_row"] == by_name["Kornia"]["ratio"] == 1
    for row in result["rows"]:
        assert row["images_per_s"] > 0 < row["host_ms"]
        assert min(row["rounds"]) <= row["images_per_s"] * 1.001
        assert row["images_per_s"] <= max(row["rounds"]) * 1.001
        assert not {"gpu_ms", "launches", "times_a_copy"} & set(row), "there is no GPU"
    reasons = {(row["name"], row["reason"]) for row in result["settings"]["skipped"]}
    assert reasons == {(name, "not installed: here for the test") for name in ("DALI", "fuse-augmentations")}
    assert len(result["settings"]["skipped"]) == 2 * len(CASES)
    assert "cls, B=2: DALI skipped: not installed" in capsys.readouterr().out


PRESETS = {
    "hflip": {"Kornia", "Kornia, matrices skipped", "DALI", "gpuaug", "gpuaug, padded boxes", "gpuaug, streamed"},
    "lsj": {"DALI", "gpuaug, padded boxes", "gpuaug, streamed"},
    "ssd": {"gpuaug, streamed"},
    "segmentation": {"DALI"},
}
"""Rows of torchvision's presets beside those that all have."""


def test_presets_have_torchvisions_rows_and_their_ratios(without_peers):
    module, arguments = SUITES["augment_presets"]
    result = run.importlib.import_module(module).main([*arguments, *TINY, "--batch", "2"])
    results.check(result)
    assert result["settings"]["baseline"] == "torchvision v2"
    assert {row["case"] for row in result["rows"]} == set(PRESETS)
    skipped = result["settings"]["skipped"]
    for case, case_rows in PRESETS.items():
        rows = {row["name"]: row for row in result["rows"] if row["case"] == case}
        assert {*rows} == {"torchvision v2", "gpuaug, from torchvision", *case_rows} - {"DALI"}
        assert [row["name"] for row in skipped if row["case"] == case] == ["DALI"] * ("DALI" in case_rows)
        assert rows["torchvision v2"]["ratio"] == rows["gpuaug, from torchvision"]["gpuaug_over_row"] == 1


def test_what_some_calls_draw_ahead_is_shared_by_all(monkeypatch):
    monkeypatch.setattr(augment, "_MAX_BATCHES", 8)
    calls, now = itertools.count(), [0.0]
    monkeypatch.setattr(augment, "perf_counter", lambda: now[0])

    def call():
        now[0] += 0.001 if next(calls) % 4 else 0.009

    assert augment.ahead_ms(call, torch.device("cpu")) == pytest.approx(2.0)


def test_batches_that_are_ready_before_a_window_are_not_counted(monkeypatch):
    discards = {}
    monkeypatch.setattr(augment, "interleave", lambda rows, **_: discards.update({row.name: row.discard for row in rows}))
    options = flags.parse(flags.parser("augment", "", batch="2"), TINY)
    augment._windows({"loaded": call_rows.QueuedCall(list, 7), "at once": list}, options, None)
    assert discards == {"loaded": 7, "at once": 0}


def test_a_row_has_the_loops_time_where_the_gpus_own_could_not_be_had():
    case = next(case for case in augmenters.cases(32) if case.name == "cls")
    batch = augmenters.random_inputs(case, 4, 32, torch.device("cpu"))
    floor = 4 * 3 * (32 * 32 + 28 * 28 * 2)
    row = {"name": "Kornia", "batch_size": 4, "images_per_s": 2000.0}
    figures = augment._gpu_figures(row, case, batch, bandwidth=1e9)
    assert figures == {
        "gpu_ms": 2.0,
        "timed_by": "wall",
        "floor_bytes": floor,
        "times_a_copy": pytest.approx(2e-3 * 1e9 / floor),
    }
    ours = augment._gpu_figures(row | {"name": "gpuaug", "gpu_ms": 0.5, "timed_by": "events"}, case, batch, bandwidth=1e9)
    assert (ours["timed_by"], ours["gpu_images_per_s"]) == ("events", 8000.0)


def test_floor_counts_the_bytes_of_masks_as_they_come_out():
    case = next(case for case in augmenters.cases(32) if case.name == "segmentation")
    batch = augmenters.random_inputs(case, 2, 32, torch.device("cpu"))
    figures = augment._gpu_figures({"name": "DALI", "batch_size": 2, "images_per_s": 1.0}, case, batch, bandwidth=1e9)
    assert figures["floor_bytes"] == 2 * (4 * 32 * 32 + case.out**2 * (3 * 4 + 8))


@pytest.mark.gpu
def test_measures_the_gpu(tmp_path):
    arguments = [
        "--device",
        "cuda",
        "--size",
        "64",
        "--batch",
        "4",
        "--seconds",
        "0.02",
        "--repeats",
        "1",
        "--cases",
        "cls,ssl",
    ]
    result = augment.main(
        [*arguments, "--rows", "torchvision v2;gpuaug;gpuaug, streamed", "--json", str(tmp_path / "augment.json")]
    )
    results.check(result)
    ours = [row for row in result["rows"] if row["name"] == "gpuaug"]
    assert all(row["timed_by"] == "events" and row["launches"] >= 1 and row["gpu_ms"] > 0 for row in ours)
    assert all("times_a_copy" in row for row in result["rows"] if row["name"] != "gpuaug, streamed")
