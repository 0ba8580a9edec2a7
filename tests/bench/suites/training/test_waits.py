import json
from itertools import pairwise

import pytest
from support.bench.commands import TINY

from bench.suites.training import waits
from gpuaug.benchkit import results


@pytest.mark.filterwarnings("ignore::gpuaug.GpuAugWarning")
def test_waits_has_the_steps_of_both_loops_and_draws_them(tmp_path):
    path, image = tmp_path / "waits.json", tmp_path / "waits.png"
    waits.main([*TINY, "--case", "small/squeezenet1_1", "--json", str(path)])
    result = json.loads(path.read_text())
    results.check(result)
    assert len(result["settings"]["loops"]) == 2
    for name, figures in result["settings"]["loops"].items():
        rows = [row for row in result["rows"] if row["case"] == name]
        assert [row["step"] for row in rows] == list(range(len(rows)))
        assert all(row["start_ms"] <= row["end_ms"] for row in rows)
        assert all(row["end_ms"] <= after["start_ms"] for row, after in pairwise(rows))
        assert figures["busy"] <= 1
        assert figures["images_per_s"] == pytest.approx(1e3 * 2 * len(rows) / rows[-1]["end_ms"])
    waits.main(["--draw", str(path), "--image", str(image)])
    assert image.read_bytes().startswith(b"\x89PNG")
