"""The record of a long run: cases, CPU time, memory and failures of each test, added to one file."""

import json
import os
from pathlib import Path

import pytest
from support.public import fuzzing


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish():
    """Add the measurements of this session to the file that ``GPUAUG_FUZZ_JSON`` names."""
    path = os.environ.get("GPUAUG_FUZZ_JSON")
    if path and fuzzing.MEASURED:
        file = Path(path)
        before = json.loads(file.read_text()) if file.exists() else None
        file.write_text(json.dumps(fuzzing.added(before), indent=1) + "\n")
