"""Which module may know of which. A module that is new has to be entered here, and so thought about."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import gpuaug

PACKAGE = Path(gpuaug.__file__).parent

MAY_IMPORT = {
    "errors": set(),
    "ragged": {"errors"},
    "batch": {"errors", "ragged"},
    "seeding": set(),
    "streams": {"errors"},
    "selection": {"batch", "errors", "ragged"},
    "watching": {"streams"},
    "drawing": {"errors"},
    "timeline": {"drawing", "errors"},
    "recording": {"streams", "timeline", "watching"},
    "copying": {"batch", "errors", "ragged"},
    "capture": {"batch", "streams"},
    "stages": {"batch", "errors", "seeding", "selection", "streams"},
    "counters": set(),
    "progress": {"errors"},
    "feed": {"errors", "progress"},
    "ring": {"batch", "streams"},
    "images": {"errors"},
    "packing": {"batch", "errors", "images", "ragged"},
    "collating": {"batch", "errors", "packing", "ring"},
    "feed": {"batch", "collating", "errors", "feed", "ring", "streams"},
    "features": {"capture", "errors", "seeding", "selection", "stages", "streams"},
    "depth": {"features", "stages", "streams"},
    "pipelined": {
        "batch",
        "copying",
        "counters",
        "depth",
        "feed",
        "progress",
        "seeding",
        "stages",
        "streams",
        "feed",
        "watching",
    },
    "loader": {
        "batch",
        "copying",
        "counters",
        "depth",
        "errors",
        "feed",
        "pipelined",
        "progress",
        "seeding",
        "stages",
        "streams",
        "feed",
    },
    "fuse": {"batch", "errors", "fuse", "ragged", "seeding"},
    "sanitizing": {"batch", "errors", "fuse"},
    "probes": {"streams"},
    "report": {"probes", "timeline"},
    "verdict": {"probes", "report"},
    "again": {"batch"},
    "parts": {"again", "batch", "features", "fuse", "loader", "probes", "report", "seeding", "stages"},
    "passes": {"batch", "counters", "depth", "errors", "feed", "pipelined", "loader"},
    "profiling": {
        "again",
        "batch",
        "copying",
        "depth",
        "errors",
        "feed",
        "pipelined",
        "loader",
        "parts",
        "passes",
        "probes",
        "recording",
        "report",
        "ring",
        "streams",
        "timeline",
        "verdict",
    },
    "showing": {
        "batch",
        "depth",
        "drawing",
        "errors",
        "features",
        "fuse",
        "loader",
        "passes",
        "probes",
        "ragged",
        "seeding",
        "selection",
        "showing",
        "stages",
        "streams",
    },
    "__init__": {
        "counters",
        "errors",
        "features",
        "fuse",
        "loader",
        "packing",
        "profiling",
        "ragged",
        "report",
        "sanitizing",
        "showing",
        "stages",
        "timeline",
    },
    "bench": {"bench", "public"},
    "cli": {"bench", "public"},
}
"""``public`` is the package itself: a part that imports it uses public names only."""

KORNIA_IS_IMPORTED_IN = {"bench", "fuse"}
HEAVY = ["matplotlib", "rich", "skimage", "torch._dynamo", "torchvision", "triton"]


def part(path):
    """The module of the package, or its folder, that ``path`` belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def trees():
    return [(path, ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py"))]


def imported(tree):
    """Every dotted name that is imported anywhere in a file, within functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def of_the_package(name):
    """The part of the package that an imported name belongs to, if it does."""
    top, _, rest = name.partition(".")
    if top != "gpuaug":
        return None
    first = rest.split(".")[0]
    return first if first in MAY_IMPORT else "public"


@pytest.mark.parametrize(("path", "tree"), [pytest.param(*pair, id=str(pair[0].relative_to(PACKAGE))) for pair in trees()])
def test_imports_go_one_way(path, tree):
    found = {of_the_package(name) for name in imported(tree)} - {None}
    assert found <= MAY_IMPORT[part(path)]


def test_every_part_of_the_package_is_in_the_table():
    assert {part(path) for path, _ in trees()} == set(MAY_IMPORT)


def test_the_table_itself_goes_one_way():
    placed = set()
    for name, needs in MAY_IMPORT.items():
        assert needs - {name, "public"} <= placed, f"{name} needs what comes after it"
        placed.add(name)


def test_kornia_is_imported_where_pipelines_are_lowered_and_measured_only():
    found = {part(path) for path, tree in trees() if any(name.split(".")[0] == "kornia" for name in imported(tree))}
    assert found <= KORNIA_IS_IMPORTED_IN


def test_one_file_knows_of_streams_and_events():
    def named(tree):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                yield ast.unparse(node)
        yield from imported(tree)

    ends = ("cuda.Stream", "cuda.Event", "cuda.ExternalStream", "torch.Stream", "torch.Event", "cuda.streams")
    found = {path.name for path, tree in trees() if path.parent == PACKAGE and any(name.endswith(ends) for name in named(tree))}
    assert found == {"streams.py"}


@pytest.mark.timeout(120)
def test_importing_the_package_is_quiet_and_light():
    code = (
        "import json, sys, numpy.random, torch, kornia.augmentation; before = set(sys.modules); import gpuaug; "
        "print(json.dumps([sorted(set(sys.modules) - before), torch.cuda.is_initialized()]))"
    )
    done = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    modules, initialized = json.loads(done.stdout)
    assert not initialized
    assert [name for name in HEAVY if name in modules] == []
    assert {name.split(".")[0] for name in modules if "." not in name} - sys.stdlib_module_names == {"gpuaug"}
