import json

from support.bench.commands import TINY

from bench.harness.lane_spans import LANES
from bench.suites.training import lanes
from gpuaug.benchkit import results


def test_lanes_has_a_span_for_each_lane_and_draws_it(tmp_path):
    path, image = tmp_path / "lanes.json", tmp_path / "lanes.png"
    lanes.main([*TINY, "--width", "4", "--json", str(path)])
    assert path.stat().st_size < 200_000
    made = json.loads(path.read_text())
    results.check(made)
    for case in ("serial", "streamed"):
        rows = [row for row in made["rows"] if row["case"] == case]
        assert {row["lane"] for row in rows} == set(LANES)
        assert all(0 <= row["start_ms"] <= row["end_ms"] for row in rows)
    lanes.main(["--draw", str(path), "--image", str(image)])
    assert image.read_bytes().startswith(b"\x89PNG")
