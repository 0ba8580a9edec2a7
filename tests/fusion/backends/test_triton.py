"""The kernels compute what the torch executor does: here under Triton's interpreter, in processes of their own."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from support.ops import pipelines
from support.process import processes
from support.public.fuzzing import outcome

import gpuaug

FOLDER = Path(__file__).parent / "interpreted"
PARTS = (
    "16_bits",
    "pipelines",
    "clips",
    "compositions",
    "crops",
    "filters",
    "labels",
    "patches",
    "readers",
    "skipped",
    "targets",
    "tiles",
)

# Two processes of equal length keep two workers busy.
FIRST_HALF = ("clips", "pipelines", "readers")
HALVES = [FIRST_HALF, tuple(part for part in PARTS if part not in FIRST_HALF)]


SCRIPT = """
import os, runpy, sys
import torch
assert "triton" not in sys.modules
os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is defined
torch.set_num_threads(1)
sys.argv[1:] = {arguments}
runpy.run_path({folder!r}, run_name="__main__")
"""


def run_interpreted(*arguments):
    """Compare kernels in a process with ``TRITON_INTERPRET=1``."""
    return processes.run_script(SCRIPT.format(arguments=arguments, folder=str(FOLDER)), timeout_s=1700)


@pytest.mark.timeout(1800)  # half a minute of one core, of which a busy machine may give a tenth
@pytest.mark.parametrize("parts", HALVES, ids=", ".join)
def test_interpreted_kernels_equal_torch(parts):
    done = run_interpreted(*parts)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", PARTS)
def test_interpreted_kernels_equal_torch_in_every_dtype_and_layout(part):
    done = run_interpreted("--all", part)
    assert done.returncode == 0, done.stderr


def test_every_part_is_interpreted():
    assert {path.stem.removeprefix("interpret_") for path in FOLDER.glob("interpret_*.py")} == set(PARTS)


GROUPS = [(group, name) for group in pipelines.GROUPS for name in getattr(pipelines, group)]


@pytest.mark.parametrize(("group", "name"), GROUPS, ids=", ".join)
def test_pipelines_that_need_three_channels_stand_in_rgb_groups(group, name):
    augment = gpuaug.fuse(getattr(pipelines, group)[name]())
    explained = outcome(augment.explain, (2, 2, 48, 64))
    refused = isinstance(explained, gpuaug.ArgumentError)  # with means of three channels
    assert (refused or any(line.reason for line in explained.lines)) == group.startswith("RGB_")
