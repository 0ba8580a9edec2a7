"""From the rows of a case to a result, whatever its peers do."""

import json

import pytest
import torch
from support.bench.clock import Clock

from bench.harness import flags, measurement, optional_rows
from bench.harness.result_check import check_result
from gpuaug.benchkit.windows import Variant

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def measure(tmp_path):
    """Measures cases whose rows a function of the batch size makes; the flags are as on a command line."""

    def measured(rows, *arguments, sizes="8,16"):
        path = tmp_path / "made.json"
        common = ["--device", "cpu", "--seconds", "0.1", "--repeats", "2", "--workers", "0", "--batch", sizes]
        options = flags.parse(flags.parser("matrix", "", batch="8", sweeps=True), [*common, "--json", str(path), *arguments])
        cases = [({"batch_size": size}, lambda stack, size=size: rows(size)) for size in options.batch]
        result = measurement.measure("matrix", options, cases, baseline="serial", ours=("ours",))
        check_result(json.loads(path.read_text()))
        assert json.loads(path.read_text())["settings"]["skipped"] == result["settings"]["skipped"]
        return result

    return measured


def names(result, size):
    return [row["name"] for row in result["rows"] if row["batch_size"] == size]


def test_a_peer_that_raises_while_it_is_measured_costs_its_row_only(measure, clock):
    def failing():
        yield 4
        raise RuntimeError("out of memory\nTry less")

    def made_rows(size):
        peer = Variant("peer", failing) if size == 16 else clock.row("peer")
        return [clock.row("serial"), optional_rows.peer_row("peer", CUDA, lambda: peer), clock.row("ours")]

    result = measure(made_rows, sizes="8,16,32")
    assert names(result, 8) == names(result, 32) == ["serial", "peer", "ours"]
    assert names(result, 16) == ["serial", "ours"]
    assert result["settings"]["skipped"] == [{"batch_size": 16, "name": "peer", "reason": "RuntimeError: out of memory"}]
