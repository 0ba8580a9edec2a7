"""The command that measures suites one after another."""

import re
from types import SimpleNamespace

import pytest
from support.bench.commands import TINY

from bench.harness import measurement, run
from bench.suites import SUITES


def test_run_goes_on_after_a_failure_and_names_it(tmp_path, capsys):
    known = {**SUITES, "missing": ("bench.suites.no_such_suite", [])}
    flags = [*TINY, "--width", "4", "--rows", "two lanes", "--results", str(tmp_path)]
    assert run.main(["missing", "branches", "chain", *flags], known) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["chain.json"]
    error = capsys.readouterr().err
    assert "failed: missing, branches\n" in error
    assert "No module named 'bench.suites.no_such_suite'" in error
    assert "unrecognized arguments: --width 4" in error


def test_run_without_suites_runs_all_of_them(tmp_path, monkeypatch):
    ran = []
    module = SimpleNamespace(main=lambda argv: ran.append(argv))
    monkeypatch.setattr(run, "importlib", SimpleNamespace(import_module=lambda name: module))
    monkeypatch.setattr(measurement, "release", lambda device: None)
    assert run.main(["--quick", "--results", str(tmp_path)], SUITES) == 0
    assert [argv[-1] for argv in ran] == [str(tmp_path / f"{name}.json") for name in SUITES]
    assert all("--quick" in argv for argv in ran)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("chain nonsense", "suites must be among encoder_decoder, .*, got nonsense. See --list."),
        ("--quick chain", "suites must come before flags, got chain after --quick. Name them first."),
    ],
)
def test_run_refuses_what_it_does_not_know(words, text, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        run.main([*words.split(), "--results", str(tmp_path)], SUITES)
    assert stop.value.code == 2
    assert re.search(text, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_run_lists_suites_with_what_they_measure(capsys):
    assert run.main(["--list"], SUITES) == 0
    listed = capsys.readouterr().out
    assert "chain                     A chain of lanes: copy" in listed
    assert listed.count("--suite classifier_sizes") == 1
    assert {line.split()[0] for line in listed.splitlines() if not line.startswith(" ")} == set(SUITES)
