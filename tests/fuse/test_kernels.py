"""The kernels compute what the torch executor does: here under Triton's interpreter, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_the_kernels_agree_with_torch():
    script = Path(__file__).with_name("interpret.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{script.parents[1]}:{script.parents[2]}"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
