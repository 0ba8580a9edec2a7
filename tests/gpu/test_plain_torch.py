"""On a GPU where Triton lacks what it needs, a fused pipeline runs, and all that a user reads says what to install."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
PTXAS = '#!/bin/sh\n[ "$1" = --version ] && echo "Cuda compilation tools, release 12.8, V12.8.93" || exit 3\n'


def read_by(variables, tmp_path):
    """What the program prints with these environment variables, and an empty cache of Triton."""
    kept = {name: value for name, value in os.environ.items() if name not in ("CC", "GPUAUG_REQUIRE_TRITON")}
    kept |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
    }
    kept = {name: value for name, value in (kept | variables).items() if value is not None}
    done = subprocess.run(
        [sys.executable, "-m", "support.gpu.plain_torch"], env=kept, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout[done.stdout.rindex("\n{\n") :])


def of_triton(read):
    return [warning for warning in read["warnings"] if "Triton" in warning]


def without_ptxas(tmp_path):
    path = tmp_path / "ptxas"
    path.write_text(PTXAS)
    path.chmod(0o755)
    return {"TRITON_PTXAS_PATH": str(path), "TRITON_PTXAS_BLACKWELL_PATH": str(path)}


@pytest.mark.parametrize("lacks", ["a compiler", "ptxas"])
def test_what_is_missing_is_said_everywhere(lacks, tmp_path):
    read = read_by({"PATH": str(tmp_path)} if lacks == "a compiler" else without_ptxas(tmp_path), tmp_path)
    (reason,) = of_triton(read)
    assert reason.startswith("gpuaug.fuse runs in plain torch on cuda:0, about 50 times slower, because Triton cannot run")
    assert ("compiler" if lacks == "a compiler" else "ptxas") in reason.partition("(")[2].partition("). See")[0]
    assert read["explain"][0].endswith("; run by torch")
    assert reason in read["explain"]
    assert read["verdict"][0] == read["bench"][0] == read["result"] == reason
    assert "run by torch" in read["repr"]


def test_a_required_triton_is_an_error(tmp_path):
    read = read_by({"PATH": str(tmp_path), "GPUAUG_REQUIRE_TRITON": "1"}, tmp_path)
    assert read["error"].startswith("DeviceError: gpuaug.fuse cannot run on cuda:0 with GPUAUG_REQUIRE_TRITON set, because")
    assert of_triton(read) == []


def test_a_home_that_cannot_be_written(tmp_path):
    read = read_by({"HOME": "/dev/null", "TRITON_CACHE_DIR": None, "GPUAUG_REQUIRE_TRITON": "1"}, tmp_path)
    (told,) = of_triton(read)
    assert told.startswith(
        "Triton compiles its kernels anew in every process, because its cache /dev/null/.triton/cache cannot"
    )
    assert read["explain"][0].endswith("; run by triton")
    assert read["result"] is None
    assert not Path(read["cache"]).exists()
