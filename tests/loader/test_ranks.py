"""Ranks of one run: a rank that dies, hangs or is slow ends the others, and a restart continues where they were."""

import json
import sys

import pytest
from support.loader import rank_program
from support.loader.rank_program import COUNT, received
from support.process.examples import finished, started, torchrun
from support.process.processes import run_script, variables

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forks of a script")


def run(folder, ranks, **options):
    """Exit codes and errors of the ranks of one run."""
    done = run_script(f"from support.loader.rank_program import in_forks\nin_forks({str(folder)!r}, {ranks}, **{options!r})")
    assert done.stdout, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("fault", "meet"),
    [
        ("hangs", "monitored_barrier"),
        *(
            pytest.param(fault, meet, marks=pytest.mark.slow)
            for fault, meet in [
                ("dies", "all_reduce"),
                ("dies", "monitored_barrier"),
                ("hangs", "all_reduce"),
                ("slow", "all_reduce"),
            ]
        ),
    ],
)
def test_the_others_end_within_the_timeout_of_their_group(fault, meet, tmp_path):
    """``in_forks`` waits for ``timeout`` and ten seconds, and for the end of all workers."""
    (code, _), (error, _) = run(tmp_path, 2, fault=fault, meet=meet)
    assert code == 1
    assert "RuntimeError" in error
    if (fault, meet) == ("hangs", "monitored_barrier"):
        assert "Rank 1 failed to pass monitoredBarrier" in error
    assert len(received(tmp_path, 0, 2)) == 2, "steps before the fault"


def values_of(folder, ranks):
    return [received(folder, rank, ranks) for rank in range(ranks)]


def test_a_run_continues_exactly_with_as_many_ranks_and_after_the_same_samples_with_others(tmp_path):
    whole, stopped, fewer = (tmp_path / name for name in ("whole", "stopped", "fewer"))
    for folder in (whole, stopped, fewer):
        folder.mkdir()
    assert run(whole, 2)[0] == [0, 0]
    assert run(stopped, 2, steps=7)[0] == [0, 0]  # the first step of the second epoch
    (fewer / "checkpoint.pt").write_bytes((stopped / "checkpoint.pt").read_bytes())
    assert run(stopped, 2)[0] == [0, 0]
    assert values_of(stopped, 2) == values_of(whole, 2)

    (code,), (error,) = run(fewer, 1)
    assert code == 1
    assert "ArgumentError: The number of ranks must be 2, as in the state, got 1." in error
    assert "pass strict=False to load_state_dict" in error
    assert run(fewer, 1, strict=False)[0] == [0]
    (later,) = values_of(fewer, 1)
    before = [values for rank in values_of(whole, 2) for (epoch, batch), values in rank.items() if (epoch, batch) == (1, 1)]
    had = [int(value) for values in before for value in values]
    assert {epoch for epoch, _ in later} == {1}
    assert sorted([*had, *(int(value) for values in later.values() for value in values)]) == list(range(COUNT))


@pytest.mark.slow
def test_torchrun_restarts_ranks_and_the_run_equals_an_uninterrupted_one(tmp_path):
    whole, failing = tmp_path / "whole", tmp_path / "failing"
    for folder, options in ((whole, {}), (failing, {"fault": "dies"})):
        folder.mkdir()
        command = ["--standalone", "--nproc-per-node", 2, "--max-restarts", 1, rank_program.__file__, folder]
        finished(started([*torchrun(*command), json.dumps(options)], PYTHONPATH=variables()["PYTHONPATH"]))
    assert values_of(failing, 2) == values_of(whole, 2)


@pytest.mark.multigpu
def test_ranks_on_two_cards_continue_exactly(tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for folder, runs in ((whole, [{}]), (stopped, [{"steps": 7}, {}])):
        folder.mkdir()
        for options in runs:
            program = [rank_program.__file__, folder, json.dumps({**options, "device": "cuda"})]
            finished(started(torchrun("--standalone", "--nproc-per-node", 2, *program), PYTHONPATH=variables()["PYTHONPATH"]))
    assert values_of(stopped, 2) == values_of(whole, 2)
