import itertools

import pytest

from bench.harness.result_check import check_result
from bench.suites.transport import chaos
from gpuaug import StreamedLoader


def assert_passes(device, trials, seed=0, processes=1):
    result = chaos.main(["--device", device, "--trials", str(trials), "--seed", str(seed), "--processes", str(processes)])
    check_result(result)
    assert result["settings"]["failed"] == []
    assert sum(row["trials"] for row in result["rows"]) == trials
    return {row["name"] for row in result["rows"]}


def test_trials_equal_depth_0_whatever_goes_wrong():
    """The first trials of this seed have one worker, whose start takes longest."""
    assert assert_passes("cpu", 4, seed=126) == {"kill", "resume", "close", "interleaved"}


@pytest.mark.slow
@pytest.mark.timeout(3600)  # most of it workers that start: a quarter of an hour on two cores
def test_many_trials_equal_depth_0():
    assert_passes("cpu", 1000, seed=1, processes=2)


@pytest.mark.gpu
def test_trials_equal_depth_0_on_a_gpu():
    assert_passes("cuda", 100)


def test_a_trial_that_fails_is_named_with_the_line_that_runs_it_again(monkeypatch, capsys):
    monkeypatch.setattr(StreamedLoader, "set_epoch", lambda self, epoch: None)
    with pytest.raises(SystemExit, match=r"because \d of 4 trials differ from depth=0: \d") as stopped:
        chaos.main(["--device", "cpu", "--trials", "4", "--seed", "5"])
    first = str(stopped.value).rpartition("--trial ")[2].rstrip(".")
    shown = " ".join(capsys.readouterr().out.split())
    assert f"python -m bench chaos --seed 5 --trial {first}" in shown
    assert "differ from those of depth=0" in shown
    with pytest.raises(SystemExit, match=f"because 1 of 1 trials differ from depth=0: {first}\\."):
        chaos.main(["--device", "cpu", "--seed", "5", "--trial", first])


@pytest.mark.parametrize("fault", ["none", "break", "close", "dataset", "stage", "interleaved"])
def test_a_batch_that_is_lost_before_the_fault_is_noticed(fault, monkeypatch):
    def losing(received, want, *, complete=True):
        monkeypatch.undo()
        del received._batches[-1:]
        received.check(want, complete=complete)

    trials = (chaos.Trial(0, number, chaos.torch.device("cpu")) for number in itertools.count())
    trial = next(each for each in trials if each.fault == fault and each.fault_batch)
    monkeypatch.setattr(chaos.ReceivedBatches, "check", losing)
    with pytest.raises(AssertionError, match="batches were delivered, of"):
        chaos.run(trial)
