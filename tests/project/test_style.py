"""Lint, formatting and types, as part of the one command that tests everything."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import typed_program

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("command", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]], ids=" ".join)
def test_style(command):
    pytest.importorskip(command[0])
    if command == ["mypy"] and torch.__version__.startswith("2.8."):
        pytest.skip("the oldest torch calls 1 - tensor of any type")
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.frameworks
def test_typed_program_is_right_for_pyright():
    pytest.importorskip("basedpyright")
    command = [sys.executable, "-m", "basedpyright", "--project", "pyproject.toml", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def test_typed_program_that_mypy_reads_runs():
    assert typed_program.main().batches == 4
