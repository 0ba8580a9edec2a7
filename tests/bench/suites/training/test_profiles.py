import pytest

from bench.figures import tables
from bench.suites.training import profiles


def assert_figures_follow_from_parts(rows):
    """The figures of a case are those of its own parts and loops."""
    *parts, in_line, streamed, whole = rows
    load, *_, step = (row["wall_ms"] for row in parts)
    assert parts[-1]["host_ms"] == step, "of the step it is the windows that count"
    on_thread = sum(row["host_ms"] for row in parts[1:])
    assert "device_ms" not in {name for row in parts for name in row}, "on a CPU all but loading is the thread's work"
    assert whole["bound_ms"] == whole["full_ms"] == pytest.approx(max(load, on_thread))
    assert whole["serial_ms"] == pytest.approx(sum(row["wall_ms"] for row in parts))
    assert (whole["in_line_ms"], whole["streamed_ms"]) == (in_line["wall_ms"], streamed["wall_ms"])
    assert whole["cached_ms"] == step
    assert whole["headspace"] == pytest.approx(streamed["wall_ms"] / step)


def test_profiles_has_the_parts_the_loops_and_a_verdict_of_each_case(tmp_path):
    small = [
        "--device",
        "cpu",
        "--size",
        "32",
        "--batch",
        "2",
        "--workers",
        "0",
        "--width",
        "4",
        "--model",
        "squeezenet1_1",
        "--repeats",
        "1",
    ]
    flags = [*small, "--batches", "8", "--timelines", str(tmp_path), "--json", str(tmp_path / "profiles.json")]

    made = profiles.main(flags)
    cases = list(dict.fromkeys(row["case"] for row in made["rows"]))
    assert cases == ["classifier, Kornia", "classifier, fused", "encoder-decoder", "ResNet-50, fused"]
    assert list(made["settings"]["verdicts"]) == [f"{case}, B=2" for case in cases]
    assert [row["name"] for row in made["rows"] if row["case"] == cases[2]] == [
        *("load", "copy", "stage/encode", "step"),
        *("loop, in line", "loop, streamed", "bounds"),
    ]
    for case in cases:
        assert_figures_follow_from_parts([row for row in made["rows"] if row["case"] == case])
    assert "timelines" not in made["settings"]
    assert {path.suffix for path in tmp_path.glob("timeline_*")} == {".png", ".json"}
    assert len(list(tmp_path.glob("timeline_*"))) == 8
    page, results = tmp_path / "page.md", tmp_path / "results"
    results.mkdir()
    (tmp_path / "profiles.json").rename(results / "profiles.json")
    page.write_text("<!-- table: profiles -->\n<!-- end -->\n")
    assert tables.main([str(page), "--results", str(results)]) == 0
    _, heading, _, *lines = page.read_text().splitlines()[1:]
    assert heading == f"| ms a batch | {' | '.join(cases)} |"
    names = [line.split(" | ")[0].removeprefix("| ") for line in lines[: lines.index("")]]
    assert names[:5] == ["load", "copy", "stage/augment", "stage/encode", "step"]
    assert names[-5:] == ["*bound, ms*", "*full, ms*", "*serial, ms*", "*exposed, ms*", "*headspace*"]
    assert f"- *{cases[2]}, B=2*: {' '.join(made['settings']['verdicts'][f'{cases[2]}, B=2'])}" in lines
