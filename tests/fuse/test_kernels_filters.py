"""The filter kernels do what torch does with values that photographs do not have, under Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_filter_kernels_agree_with_torch():
    script = Path(__file__).with_name("interpret_filters.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{script.parents[1]}:{script.parents[2]}"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
