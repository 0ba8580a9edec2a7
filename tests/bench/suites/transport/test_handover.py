from support.bench.commands import TINY

from bench.suites.transport import handover
from gpuaug.benchkit import results


def test_handover_times_each_next(tmp_path):
    made = handover.main([*TINY, "--calls", "20", "--json", str(tmp_path / "handover.json")])
    assert {row["case"] for row in made["rows"]} == {"two tensors, large", "two tensors, small", "many leaves"}
    assert all(row["median_us"] > 0 and row["calls"] == 20 for row in made["rows"])
    results.check(made)
