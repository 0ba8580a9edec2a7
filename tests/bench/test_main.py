"""The command line: python -m bench."""

import importlib

import pytest

from bench import __main__
from bench.figures import plot
from bench.suites import SUITES


def test_commands_get_their_words_and_their_status_counts(monkeypatch, capsys):
    got = []
    for command, module in __main__.COMMANDS.items():

        def called(argv, *suites, command=command):
            got.append((command, argv))
            assert suites == ((SUITES,) if command == "run" else ())
            return 3

        monkeypatch.setattr(importlib.import_module(module), "main", called)
        assert __main__.main([command, "a", "--flag", "b c", "-h"]) == 3
    assert got == [(command, ["a", "--flag", "b c", "-h"]) for command in __main__.COMMANDS]
    monkeypatch.setattr(plot, "main", lambda argv: ["a list of pictures"])
    assert __main__.main(["plot"]) == 0
    with pytest.raises(SystemExit):
        __main__.main(["nonsense"])
    assert "invalid choice: 'nonsense'" in capsys.readouterr().err


def test_help_says_what_is_measured(capsys):
    with pytest.raises(SystemExit) as stop:
        __main__.main(["encoder_decoder", "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: python -m bench encoder_decoder [-h]" in shown
    assert "Segmentation with a frozen encoder" in shown


def test_help_names_every_command_that_is_no_suite(capsys):
    with pytest.raises(SystemExit):
        __main__.main(["--help"])
    shown = capsys.readouterr().out
    suites = {module.rpartition(".")[2] for module, _ in SUITES.values()}
    assert all(f"python -m bench {command} " in shown for command in set(__main__.COMMANDS) - suites)
