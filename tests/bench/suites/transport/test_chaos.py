import itertools
import json

import pytest
import torch

from bench.data.chaos.loaders import FORMS
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
        del received.batches[-1:]
        received.check(want, complete=complete)

    trials = (chaos.Trial(0, number, chaos.torch.device("cpu")) for number in itertools.count())
    trial = next(each for each in trials if each.fault == fault and each.fault_batch)
    monkeypatch.setattr(chaos.ReceivedBatches, "check", losing)
    with pytest.raises(AssertionError, match="batches were delivered, of"):
        chaos.run(trial)


def trial_of(form):
    trials = (chaos.Trial(0, number, torch.device("cpu")) for number in itertools.count())
    return next(each for each in trials if each.form == form and each.fault == "none" and "encode" in each.stages)


@pytest.mark.parametrize("form", dict.fromkeys(FORMS))
def test_a_wrong_feature_is_noticed_in_batches_of_every_form(form, monkeypatch):
    trial = trial_of(form)
    chaos.run(trial)
    on_host = chaos.on_host

    def wrong(batch):
        return {name: value + 1 if value.is_floating_point() else value for name, value in on_host(batch).items()}

    monkeypatch.setattr(chaos, "on_host", wrong)
    with pytest.raises(AssertionError, match="differ from those of depth=0"):
        chaos.run(trial)


def test_a_feature_cache_is_read_and_a_second_loader_is_checked(monkeypatch):
    rows = []
    close = StreamedLoader.close
    monkeypatch.setattr(StreamedLoader, "close", lambda self: (rows.append(self.stats().rows_read), close(self))[1])
    trial = trial_of("cache")
    trial.is_recorded = True
    trial.epoch = trial.views
    chaos.run(trial)
    assert sum(rows) >= trial.count
    trial = trial_of("images")
    trial.second_loader = True
    chaos.run(trial)
    monkeypatch.setattr(chaos.SecondLoader, "read", lambda self: None)
    monkeypatch.setattr(chaos.SecondLoader, "check", lambda self: pytest.fail("checked"))
    with pytest.raises(pytest.fail.Exception, match="checked"):
        chaos.run(trial)


def test_calls_add_to_one_result_and_continue_with_the_next_trials(tmp_path, monkeypatch, capsys):
    numbers = []
    monkeypatch.setattr(chaos, "run", lambda trial: numbers.append(trial.number))
    path = tmp_path / "chaos.json"
    run = ["--device", "cpu", "--trials", "7", "--seed", "3", "--json", str(path)]
    chaos.main(run)
    chaos.main([*run, "--add"])
    chaos.main([*run, "--add", "--seconds", "0.000001"])  # one chunk
    assert numbers == list(range(14 + chaos.CHUNK_TRIALS))
    result = json.loads(path.read_text())
    check_result(result)
    assert sum(row["trials"] for row in result["rows"]) == len(numbers)
    assert [run["trials"] for run in result["settings"]["runs"]] == [7, 7, chaos.CHUNK_TRIALS]
    last = " ".join(capsys.readouterr().out.split()).rpartition("chaos: ")[2]
    assert last == f"{len(numbers)} trials, {chaos.CHUNK_TRIALS} of them now, 0 failed, 3 calls"
    with pytest.raises(SystemExit, match="--seed must be 3"):
        chaos.main([*run, "--add", "--seed", "4"])
    monkeypatch.setattr(chaos, "run", lambda trial: pytest.fail("it differs") if trial.number == 20 else None)
    monkeypatch.setattr(chaos, "_passes", lambda trial: trial.number != 20)
    with pytest.raises(SystemExit, match=r"because 1 of 7 trials differ from depth=0: 20\. .*--trial 20"):
        chaos.main([*run, "--add"])
    assert json.loads(path.read_text())["settings"]["failed"] == [20]


def test_a_process_that_ends_is_reported_with_the_trials_before(tmp_path, monkeypatch):
    def finished_chunks(options, chunks, stack):
        if finished:
            yield chaos._run_chunk(options, range(finished))
        raise chaos.BrokenProcessPool

    finished = 5
    monkeypatch.setattr(chaos, "run", lambda trial: None)
    monkeypatch.setattr(chaos, "_finished_chunks", finished_chunks)
    path = tmp_path / "chaos.json"
    with pytest.raises(SystemExit, match=r"because a process ended within trials 5 to 14, "):
        chaos.main(["--device", "cpu", "--trials", "50", "--json", str(path)])
    settings = json.loads(path.read_text())["settings"]
    assert (settings["runs"][0]["trials"], settings["next"]) == (5, 15)
    finished = 0
    with pytest.raises(SystemExit, match=r"because a process ended within trials 0 to 9, "):
        chaos.main(["--device", "cpu", "--trials", "50"])
