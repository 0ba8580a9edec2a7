"""``import gpuaug``: quiet, light, and the package itself wherever the script lies."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import gpuaug

HEAVY = ["matplotlib", "rich", "skimage", "torch._dynamo", "torchvision", "triton"]


IMPORT = """
import json, os, sys, warnings, numpy.random, torch, kornia.augmentation
before = set(sys.modules)
with warnings.catch_warnings():
    warnings.simplefilter("always")
    import gpuaug
added = sorted(set(sys.modules) - before)
print(json.dumps([added, torch.cuda.is_initialized(), os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]]))
print("imported", file=sys.stderr, flush=True)
"""

USED = """
import sys

def absent(*names):
    found = {name for name in names if name in sys.modules}
    assert not found, found

import gpuaug.cli
absent("matplotlib", "rich", "skimage", "torchvision")
import torch
gpuaug.TransformStage(torch.nn.Sequential(torch.nn.Identity()))
gpuaug.TransformStage(len)
absent("torchvision")
import gpuaug.profiler.timeline as timeline
absent("matplotlib")
run = timeline.Timeline((timeline.Span("copy", "copy", 0, 0, 1),), "CPU", 2)
run.chrome_trace()
absent("matplotlib")
run.figure()
absent("matplotlib.pyplot")
import kornia.augmentation as K
gpuaug.fuse(K.RandomInvert())
absent("torchvision.transforms.v2")
gpuaug.show(gpuaug.StreamedLoader([torch.rand(2, 3, 4, 4)], device="cpu"))
absent("matplotlib.pyplot")
"""


@pytest.fixture(scope="module")
def interpreter():
    """A new interpreter that imports the package and then uses it, since to import torch takes seconds."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    command = [sys.executable, "-c", IMPORT + USED]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


@pytest.mark.timeout(120)
def test_import_is_quiet_and_light(interpreter):
    assert interpreter.stderr.partition("imported\n")[:2] == ("", "imported\n")
    modules, initialized, hardware_queues = json.loads(interpreter.stdout.splitlines()[0])
    assert not initialized
    assert hardware_queues == "32"
    assert [name for name in HEAVY if name in modules] == []
    assert {name.split(".")[0] for name in modules if "." not in name} - sys.stdlib_module_names == {"gpuaug"}


@pytest.mark.timeout(120)
def test_what_does_not_need_a_library_does_not_import_it(interpreter):
    """The command, stages, a timeline, its figure, a fused pipeline of Kornia's, and ``show``."""
    assert (interpreter.returncode, interpreter.stderr.partition("imported\n")[2]) == (0, "")
    assert len(interpreter.stdout.splitlines()) == 1


def test_a_script_beside_a_clone_finds_the_package_and_not_the_clones_folder(tmp_path):
    try:
        origin = json.loads(metadata.distribution("gpuaug").read_text("direct_url.json") or "{}").get("url")
    except metadata.PackageNotFoundError:
        pytest.skip("gpuaug is not installed here")
    if origin not in (None, Path(gpuaug.__file__).parents[1].as_uri()):
        pytest.skip(f"gpuaug is installed from {origin}, which is not this checkout")
    (tmp_path / "gpuaug").mkdir()  # a clone, whose folder of the same name holds the package
    script = tmp_path / "train.py"
    script.write_text("import importlib.util; print(importlib.util.find_spec('gpuaug').origin)")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    found = done.stdout.strip()
    assert found != "None", "the clone's folder, as a namespace package: run pip install -e . again"
    assert Path(found).name == "__init__.py"
    assert tmp_path not in Path(found).parents
