"""``import gpuaug``: quiet, light, and the package itself wherever the script lies."""

import json
import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.process.processes import run_script

import gpuaug

HEAVY = ["matplotlib", "rich", "skimage", "torch._dynamo", "torchvision", "triton"]


IMPORT = """
import json, sys
if "IMPORT" not in globals():  # in an interpreter of its own, where no script server has imported gpuaug
    from support.process.script_server import IMPORT
print(json.dumps(IMPORT))
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
def process():
    """A process that has imported the package and then uses it: forked, since to import torch takes seconds."""
    return run_script(IMPORT + USED)


def test_import_is_quiet_and_light(process):
    assert process.stderr.partition("imported\n")[:2] == ("", "imported\n")
    description = json.loads(process.stdout.splitlines()[0])
    assert description["stderr"] == ""
    assert not description["cuda"]
    assert description["hardware_queues"] == "32"
    modules = description["modules"]
    assert [name for name in HEAVY if name in modules] == []
    assert {name for name in modules if "." not in name} - sys.stdlib_module_names == {"gpuaug"}


def test_what_does_not_need_a_library_does_not_import_it(process):
    """The command, stages, a timeline, its figure, a fused pipeline of Kornia's, and ``show``."""
    assert (process.returncode, process.stderr.partition("imported\n")[2]) == (0, "")
    assert len(process.stdout.splitlines()) == 1


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
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    found = done.stdout.strip()
    assert found != "None", "the clone's folder, as a namespace package: run pip install -e . again"
    assert Path(found).name == "__init__.py"
    assert tmp_path not in Path(found).parents


def test_packages_of_the_extra_test_are_installed():
    """Otherwise tests skip themselves, and nobody hears of a change that breaks them."""
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    requirements = [Requirement(text) for text in extras["test"]]
    for requirement in requirements:
        if requirement.name == "gpuaug":
            requirements += [Requirement(text) for extra in sorted(requirement.extras) for text in extras[extra]]
        elif requirement.marker is None or requirement.marker.evaluate():
            assert requirement.specifier.contains(metadata.version(requirement.name), prereleases=True), requirement
