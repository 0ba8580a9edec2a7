import itertools
import json
from functools import partial

import pytest
import torch
from support.replay import left_to_kornia

from bench.figures import plot, tables
from bench.harness import call_rows, flags, optional_rows, run
from bench.peers import augmenters
from bench.suites import SUITES
from bench.suites.augmentation import augment
from gpuaug.benchkit import results

pytestmark = left_to_kornia  # RandAugment as its users have it, equalize and auto_contrast included


TINY = ["--device", "cpu", "--size", "32", "--batch", "2,4", "--seconds", "0.02", "--repeats", "2"]
EVERYWHERE = {"torchvision v2", "Kornia", "Kornia, matrices skipped", "gpuaug"}
CASES = ("seed", "cls", "ssl", "masks", "randaugment")


@pytest.fixture
def without_peers(monkeypatch):
    """Neither of the libraries that this environment may or may not have."""

    def missing(*_):
        raise optional_rows.MissingError("not installed: here for the test")

    ways = augmenters.AUGMENTERS | {"fuse-augmentations": missing, "DALI": missing}
    monkeypatch.setattr(augmenters, "AUGMENTERS", ways)


def test_has_every_row_of_every_case_and_says_what_was_skipped(without_peers, tmp_path, capsys):
    path = tmp_path / "augment.json"
    made = augment.main([*TINY, "--quick", "--json", str(path)])
    assert json.loads(path.read_text())["rows"] == json.loads(json.dumps(made["rows"]))
    results.check(json.loads(path.read_text()))
    for case in CASES:
        own = {"seed": {"torchvision loop"}, "cls": {"gpuaug, streamed"}}.get(case, set())
        own |= {"gpuaug, antialiased"} if case in ("seed", "cls", "ssl") else set()
        own |= {"gpuaug, from torchvision"}
        for size in (2, 4):
            rows = [row for row in made["rows"] if (row["case"], row["batch_size"]) == (case, size)]
            assert {row["name"] for row in rows} == EVERYWHERE | own
            by_name = {row["name"]: row for row in rows}
            assert by_name["gpuaug"]["gpuaug_over_row"] == by_name["Kornia"]["ratio"] == 1
    for row in made["rows"]:
        assert row["images_per_s"] > 0 < row["host_ms"]
        assert min(row["rounds"]) <= row["images_per_s"] * 1.001
        assert row["images_per_s"] <= max(row["rounds"]) * 1.001
        assert not {"gpu_ms", "launches", "times_a_copy"} & set(row), "there is no GPU"
    reasons = {(row["name"], row["reason"]) for row in made["settings"]["skipped"]}
    assert reasons == {(name, "not installed: here for the test") for name in ("DALI", "fuse-augmentations")}
    assert len(made["settings"]["skipped"]) == 2 * len(CASES) * 2
    assert "cls, B=4: DALI skipped: not installed" in capsys.readouterr().out


PRESETS = {
    "hflip": {"Kornia", "Kornia, matrices skipped", "DALI", "gpuaug", "gpuaug, padded boxes"},
    "lsj": {"DALI", "gpuaug, padded boxes"},
    "ssd": set(),
    "segmentation": {"DALI"},
}
"""Rows of torchvision's presets beside those that all have."""


def test_presets_have_torchvisions_rows_and_their_ratios(without_peers, monkeypatch):
    monkeypatch.setattr(call_rows, "_CALLS", 3)
    module, words = SUITES["augment_presets"]
    made = run.importlib.import_module(module).main([*words, *TINY, "--batch", "2"])
    results.check(made)
    assert made["settings"]["baseline"] == "torchvision v2"
    assert {row["case"] for row in made["rows"]} == set(PRESETS)
    skipped = made["settings"]["skipped"]
    for case, own in PRESETS.items():
        rows = {row["name"]: row for row in made["rows"] if row["case"] == case}
        assert {*rows} == {"torchvision v2", "gpuaug, from torchvision", *own} - {"DALI"}
        assert [row["name"] for row in skipped if row["case"] == case] == ["DALI"] * ("DALI" in own)
        assert rows["torchvision v2"]["ratio"] == rows["gpuaug, from torchvision"]["gpuaug_over_row"] == 1


def test_what_some_calls_draw_ahead_is_shared_by_all(monkeypatch):
    monkeypatch.setattr(augment, "_MOST_BATCHES", 8)
    calls, now = itertools.count(), [0.0]
    monkeypatch.setattr(augment, "perf_counter", lambda: now[0])

    def call():
        now[0] += 0.001 if next(calls) % 4 else 0.009

    assert augment.ahead_ms(call, torch.device("cpu")) == pytest.approx(2.0)


def test_cases_of_different_baselines_have_none_in_common(monkeypatch):
    monkeypatch.setattr(call_rows, "_CALLS", 3)
    made = augment.main([*TINY, "--batch", "2", "--cases", "cls,lsj", "--rows", "gpuaug, from torchvision"])
    assert made["settings"]["baseline"] is None
    assert {row["case"]: row["name"] for row in made["rows"] if row["ratio"] == 1} == {"cls": "Kornia", "lsj": "torchvision v2"}
    assert "In brackets: the ratio to the row at 1.00" in tables.markdown(made)


@pytest.mark.parametrize("calls_before", [0, 5], ids=["at once", "in a window"])
def test_a_row_that_fails_leaves_the_others(monkeypatch, calls_before):
    def broken(case, batch, stack):
        left = [None] * calls_before

        def call():
            if not left:
                raise ZeroDivisionError("broken on purpose\nand explained at length")
            left.pop()
            return batch.images

        return call

    monkeypatch.setattr(augmenters, "AUGMENTERS", augmenters.AUGMENTERS | {"DALI": broken})
    monkeypatch.setattr(call_rows, "_CALLS", 3)
    made = augment.main([*TINY, "--batch", "2", "--cases", "cls", "--rows", "DALI;gpuaug"])
    assert [row["name"] for row in made["rows"]] == ["Kornia", "gpuaug"]
    (skipped,) = made["settings"]["skipped"]
    assert skipped == {"case": "cls", "batch_size": 2, "name": "DALI", "reason": "ZeroDivisionError: broken on purpose"}


def test_batches_that_are_ready_before_a_window_are_not_counted(monkeypatch):
    seen = {}
    monkeypatch.setattr(augment, "interleave", lambda rows, **_: seen.update({row.name: row.discard for row in rows}))
    options = flags.read(flags.parser("augment", "", batch="2"), TINY)
    augment._windows({"loaded": call_rows.QueuedCall(list, 7), "at once": list}, options, None)
    assert seen == {"loaded": 7, "at once": 0}


def test_an_interruption_keeps_the_cases_before_it(monkeypatch, tmp_path):
    path = tmp_path / "augment.json"
    measured = augment.rows_of

    def interrupted(case, *rest):
        if case.name == "ssl":
            raise KeyboardInterrupt
        return measured(case, *rest)

    monkeypatch.setattr(augment, "rows_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        augment.main([*TINY, "--batch", "2", "--rows", "gpuaug", "--json", str(path)])
    kept = json.loads(path.read_text())
    results.check(kept)
    assert [row["case"] for row in kept["rows"]] == ["seed", "seed", "cls", "cls"]


def test_wrong_names_end_it_before_anything_is_measured():
    names = "seed, cls, ssl, masks, randaugment, hflip, lsj, ssd, segmentation"
    with pytest.raises(SystemExit, match=f"--cases must be among {names}, got sed. Leave it out to measure all but"):
        augment.main([*TINY, "--cases", "sed"])
    with pytest.raises(SystemExit, match=r"--rows must be among torchvision loop; .*, got Dali\."):
        augment.main([*TINY, "--rows", "Dali"])


def test_pipelines_are_compiled_once_and_only_on_request_without_a_gpu():
    made = partial(flags.parser, "augment", "", batch="64,256")
    on_gpu = {"device": torch.device("cuda")}
    case = {case.name: case for case in augmenters.cases(32)}
    for words, device, size, name, compiled in [
        ([], on_gpu, 256, "cls", True),
        ([], on_gpu, 64, "cls", False),
        ([], on_gpu, 256, "masks", False),
        ([], {}, 256, "cls", False),
        (["--quick"], on_gpu, 64, "cls", False),
        (["--rows", "Kornia compiled"], {}, 256, "cls", True),
    ]:
        options = flags.read(made(), ["--device", "cpu", *words])
        vars(options).update(device)
        assert (augmenters.COMPILED in augment.chosen(case[name], size, options)) == compiled


@pytest.fixture
def measured(tmp_path):
    rows = [
        {
            "case": case,
            "batch_size": size,
            "name": name,
            "images_per_s": rate * size,
            "rounds": [rate * size] * 2,
            "ratio": rate / 100,
            "gpuaug_over_row": 1234.0 / rate,
            "host_ms": 0.25,
            "first_batch_s": 1.5,
        }
        for size in (64, 256)
        for case in ("cls", "ssl")
        for name, rate in (("Kornia", 100.0), ("gpuaug", 1234.0))
    ]
    columns = ["case", "batch_size", "name", "images_per_s", "gpuaug_over_row", "host_ms", "gpu_ms", "first_batch_s"]
    settings = {"baseline": "Kornia", "ours": ["gpuaug"], "ceilings": [], "columns": columns, "skipped": []}
    made = results.result("augment", rows=rows, settings=settings, device=torch.device("cpu"))
    results.write(tmp_path / "results" / "augment.json", made)
    return tmp_path / "results"


def test_tables_show_the_rates_of_the_largest_batch_and_all_of_a_case(measured, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "\n".join(f"<!-- table: {name} -->\nold\n<!-- end -->" for name in ("augment", "augment.ssl", "augment.none"))
    )
    assert tables.main([str(page), "--results", str(measured)]) == 0
    whole, ssl, missing = page.read_text().split("<!-- end -->")[:3]
    assert "| images/s, B=256 | cls | ssl |" in whole
    assert "| gpuaug | 315,904 (12.34x) | 315,904 (12.34x) |" in whole
    assert "| batch size | name | images/s | gpuaug over row | host, ms | first batch, s |" in ssl
    assert "| 64 | Kornia | 6,400 | 12.3 | 0.25 | 1.5 |" in ssl
    assert "| 256 | gpuaug | 315,904 | 1 | 0.25 | 1.5 |" in ssl
    assert "In brackets" in whole
    assert "In brackets" not in ssl
    assert "old" in missing, "a case that was not measured is left alone"


def test_plot_draws_it(measured, tmp_path):
    (drawn,) = plot.main(["--results", str(measured), "--images", str(tmp_path)])
    assert drawn.name == "augment.png"
    assert drawn.stat().st_size > 1000


def test_a_row_has_the_loops_time_where_the_gpus_own_could_not_be_had():
    case = next(case for case in augmenters.cases(32) if case.name == "cls")
    batch = augmenters.sample(case, 4, 32, torch.device("cpu"))
    floor = 4 * 3 * (32 * 32 + 28 * 28 * 2)
    row = {"name": "Kornia", "batch_size": 4, "images_per_s": 2000.0}
    found = augment._gpu_figures(row, case, batch, bandwidth=1e9)
    assert found == {"gpu_ms": 2.0, "timed_by": "wall", "floor_bytes": floor, "times_a_copy": pytest.approx(2e-3 * 1e9 / floor)}
    ours = augment._gpu_figures(row | {"name": "gpuaug", "gpu_ms": 0.5, "timed_by": "events"}, case, batch, bandwidth=1e9)
    assert (ours["timed_by"], ours["gpu_images_per_s"]) == ("events", 8000.0)


def test_floor_counts_the_bytes_of_masks_as_they_come_out():
    case = next(case for case in augmenters.cases(32) if case.name == "segmentation")
    batch = augmenters.sample(case, 2, 32, torch.device("cpu"))
    found = augment._gpu_figures({"name": "DALI", "batch_size": 2, "images_per_s": 1.0}, case, batch, bandwidth=1e9)
    assert found["floor_bytes"] == 2 * (4 * 32 * 32 + case.out**2 * (3 * 4 + 8))


@pytest.mark.gpu
def test_measures_presets_on_the_gpu():
    words = ["--device", "cuda", "--size", "64", "--seconds", "0.02", "--repeats", "1", "--batch", "4"]
    made = augment.main(
        [*words, "--cases", "hflip,lsj,ssd,segmentation", "--rows", "DALI;gpuaug, from torchvision;gpuaug, padded boxes"]
    )
    results.check(made)
    assert all("times_a_copy" in row for row in made["rows"])
    padded = [row for row in made["rows"] if row["name"] == "gpuaug, padded boxes"]
    assert [row["case"] for row in padded] == ["hflip", "lsj"]
    assert all(row["launches"] >= 1 for row in padded)


@pytest.mark.gpu
def test_measures_the_gpu(tmp_path):
    words = ["--device", "cuda", "--size", "64", "--batch", "4", "--seconds", "0.02", "--repeats", "1", "--cases", "cls,ssl"]
    made = augment.main([*words, "--rows", "torchvision v2;gpuaug;gpuaug, streamed", "--json", str(tmp_path / "augment.json")])
    results.check(made)
    ours = [row for row in made["rows"] if row["name"] == "gpuaug"]
    assert all(row["timed_by"] == "events" and row["launches"] >= 1 and row["gpu_ms"] > 0 for row in ours)
    assert all("times_a_copy" in row for row in made["rows"] if row["name"] != "gpuaug, streamed")
