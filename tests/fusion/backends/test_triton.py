"""The kernels compute what the torch executor does: here under Triton's interpreter, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPTS = (
    "interpret.py",
    "interpret_crops.py",
    "interpret_filters.py",
    "interpret_labels.py",
    "interpret_readers.py",
    "interpret_targets.py",
)


@pytest.fixture(scope="module")
def interpreted():
    """All scripts, at once: each keeps a core busy for a minute."""
    folder = Path(__file__).parent / "interpreted"
    tests = folder.parents[2]
    paths = {"PYTHONPATH": f"{tests}:{tests.parent}"}
    environment = {**os.environ, **paths, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    started = {
        name: subprocess.Popen(
            [sys.executable, str(folder / name)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for name in SCRIPTS
    }
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


@pytest.mark.timeout(560)  # all of them may share a slow machine's two cores
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_kernels_agree_with_torch(interpreted, name):
    said, _ = interpreted[name].communicate(timeout=540)
    assert interpreted[name].returncode == 0, said
