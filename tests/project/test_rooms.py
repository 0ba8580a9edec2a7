"""The rooms of the package: what may import what, and how large a file and a folder may be."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from support.messages.finder import ROOT, nodes, sources

import gpuaug

PACKAGE = Path(gpuaug.__file__).parent

ROOMS = {
    "core": set(),
    "stages": {"core"},
    "feed": {"core"},
    "fusion": {"core"},
    "decode": {"core", "stages", "feed"},
    "cache": {"core", "stages", "decode"},
    "loader": {"core", "stages", "feed", "decode", "cache"},
    "integrations": {"loader"},
    "profiler": {"core", "stages", "feed", "fusion", "decode", "loader"},
    "viewer": {"core", "stages", "fusion", "loader", "profiler"},
    "__init__": {"core", "stages", "feed", "fusion", "decode", "cache", "loader", "profiler", "viewer"},
    "benchkit": {"core", "public"},
    "cli": {"benchkit", "public"},
}
"""Rooms and what each may import. ``public`` is the package itself: what imports it uses public names only.

Benchmarks count cores as the package does.
"""

FUSION = {
    "pixels": set(),
    "transforms": set(),
    "ops": {"pixels", "transforms"},
    "clips": {"ops"},
    "policies": {"pixels", "ops"},
    "options": {"policies"},
    "combine_ops": {"ops"},
    "lower": {"pixels", "ops", "policies", "combine_ops"},
    "draws": {"ops", "policies", "lower"},
    "program": {"pixels", "ops", "policies", "combine_ops", "options", "lower", "draws"},
    "backends": {"pixels", "ops", "clips", "policies", "program"},
    "table": {"ops", "program", "backends"},
    "forms": {"pixels", "ops", "clips", "combine_ops", "options", "program", "backends"},
    "processors": {"options", "backends"},
    "combining": {"ops", "combine_ops", "forms"},
    "explain": {"ops", "policies", "combine_ops", "lower", "program", "table"},
    "fuse": {
        *("pixels", "ops", "clips", "policies", "options", "lower", "draws", "program", "backends", "table", "forms"),
        *("combine_ops", "processors", "explain"),
    },
    "normalization": set(),
}
"""Modules and folders of ``fusion``, in the order of the data, and what each may import."""

MOST_FILES, MOST_LINES = 16, 500

BUDGETS = {
    "__init__": 87,
    "benchkit": 753,
    "cache": 1_136,
    "cli": 297,
    "core": 1_613,
    "decode": 4_415,
    "feed": 2_348,
    "fusion": 14_415,
    "integrations": 49,
    "loader": 1_295,
    "profiler": 1_177,
    "stages": 1_852,
    "viewer": 849,
}
"""Lines of code of each room at most, without blank lines, comments and docstrings.

A budget goes down with every removal. A commit that raises it says what the lines buy.
"""

SINGLE_CLASSES = {
    "fusion.lower.by_name",
    "fusion.ops.torchvision.elastic",
    "fusion.ops.torchvision.iou_crop",
    "fusion.ops.torchvision.jpeg",
    "fusion.ops.torchvision.timm",
    "integrations.accelerate",
    "integrations.lightning",
}
"""Modules about a single class, or the few classes of one small library."""

PATHS = sorted(PACKAGE.rglob("*.py"))


@cache
def trees():
    """Syntax tree of each file. Not read at import, because that takes a second."""
    return {ROOT / path: tree for path, tree in sources("gpuaug")}


def module_of(path):
    """``gpuaug.feed.ring`` for a file, or the package for its ``__init__.py``."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in PATHS}


@cache
def imported(tree):
    """Every dotted name that is imported anywhere in a file, within functions too."""
    return list(_imported(tree))


def _imported(tree):
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules_imported(tree):
    """The modules of the package that a file imports."""
    for name in imported(tree):
        while name.startswith("gpuaug") and name not in MODULES:
            name = name.rpartition(".")[0]
        if name.startswith("gpuaug"):
            yield name


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def room_imported(name):
    return name.split(".")[1] if "." in name else "public"


def test_rooms_import_one_way():
    found = {path: {room_imported(name) for name in modules_imported(trees()[path])} - {room(path)} for path in PATHS}
    assert {str(path): rooms - ROOMS[room(path)] for path, rooms in found.items() if not rooms <= ROOMS[room(path)]} == {}


def inner(name):
    return name.removeprefix("gpuaug.fusion.").split(".")[0]


def test_fusion_imports_one_way():
    modules = [name for name in MODULES if name.startswith("gpuaug.fusion.")]
    assert modules
    wrong = {}
    for name in modules:
        imports = [other for other in modules_imported(trees()[MODULES[name]]) if other.startswith("gpuaug.fusion.")]
        found = {inner(other) for other in imports} - {inner(name)}
        if not found <= FUSION[inner(name)]:
            wrong[name] = found - FUSION[inner(name)]
    assert wrong == {}


def test_the_package_fusion_itself_imports_nothing():
    assert not list(modules_imported(trees()[MODULES["gpuaug.fusion"]]))


@pytest.mark.parametrize("table", [ROOMS, FUSION], ids=["rooms", "fusion"])
def test_a_table_itself_goes_one_way(table):
    placed = {"public"}
    for name, needs in table.items():
        assert needs <= placed, f"{name} needs what comes after it"
        placed.add(name)


def test_every_room_is_in_the_table():
    assert {room(path) for path in PATHS} == set(ROOMS)
    fusion = {inner(name) for name in MODULES if name.startswith("gpuaug.fusion.")}
    assert fusion == set(FUSION)


def test_no_modules_import_each_other_in_a_circle():
    needs = {module_of(path): set(modules_imported(tree)) - {module_of(path)} for path, tree in trees().items()}
    while free := {name for name, wanted in needs.items() if not wanted & set(needs)}:
        needs = {name: wanted for name, wanted in needs.items() if name not in free}
    assert not needs, "each of these needs another one of them"


def test_no_file_and_no_folder_is_larger_than_a_reader_holds_in_mind():
    long = {module_of(path): len(path.read_text().splitlines()) for path in PATHS}
    assert {name: count for name, count in long.items() if count > MOST_LINES} == {}
    folders = [path.parent for path in PATHS]
    assert {str(folder): folders.count(folder) for folder in set(folders) if folders.count(folder) > MOST_FILES} == {}


def spine():
    """Files that ``CONTRIBUTING.md`` says to read first."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## What to read first")[2].partition("\n## ")[0]
    return [PACKAGE / name for name in re.findall(r"^\| `(\S+\.py)` \|", section, re.MULTILINE)]


def test_files_to_read_first_import_no_file_about_a_single_class():
    leaves = {f"gpuaug.{name}" for name in SINGLE_CLASSES}
    assert leaves <= MODULES.keys()
    assert len(spine()) == 24
    found = {path.name: leaves & set(modules_imported(trees()[path])) for path in spine()}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def lines_of_code(path):
    """Number of lines with code: not blank, no comment, no docstring. A string that is a statement is a docstring."""
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    code, docstrings = {number for number, line in lines if line.strip() and not line.lstrip().startswith("#")}, set()
    for node in nodes(trees()[path]):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, ast.Constant | ast.JoinedStr):  # blank lines of a text count
            code.update(range(node.lineno, node.end_lineno + 1))
    return len(code - docstrings)


def test_no_room_has_more_code_than_its_budget():
    counts = Counter()
    for path in PATHS:
        counts[room(path)] += lines_of_code(path)
    assert counts.keys() == BUDGETS.keys()
    over = {name: f"{count} of {BUDGETS[name]}" for name, count in counts.items() if count > BUDGETS[name]}
    assert over == {}, "remove code, or raise the budget in a commit that says what the lines buy"


MOST_FILES_WITHOUT_MAP = 6

MAPPED = [
    folder
    for folder in sorted({path.parent for path in PATHS})
    if folder != PACKAGE and ((folder / "README.md").exists() or len([*folder.glob("[!_]*.py")]) > MOST_FILES_WITHOUT_MAP)
]
"""Folders of the package that have a README, or need it."""


@pytest.mark.parametrize("root", MAPPED, ids=lambda root: str(root.relative_to(PACKAGE)))
def test_folders_have_a_map_that_fits_a_screen(root):
    text = (root / "README.md").read_text()
    assert len(text.splitlines()) <= 40
    assert text.count("```") == 2, "one diagram"
    named = {name.strip("`") for name in re.findall(r"[\w/]+\.py\b|`(?:\w+/)+`", text)}
    room = PACKAGE / root.relative_to(PACKAGE).parts[0]
    places = (root, root / "triton", room, PACKAGE, ROOT)
    assert {name for name in named if not any((place / name).exists() for place in places)} == set()


def test_no_package_has_the_name_of_a_public_function():
    packages = {path.parent.name for path in PATHS if path.name == "__init__.py"} - {"gpuaug"}
    assert packages & set(gpuaug.__all__) == set()


def test_other_rooms_ask_the_loader_by_public_names():
    """The profiler, the viewer and the kit go through ``gpuaug.loader.inspection``."""
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {ast.unparse(node)}"
        for path, tree in trees().items()
        if room(path) in ("profiler", "viewer", "benchkit", "cli")
        for node in nodes(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if "loader" in ast.unparse(node.value).rpartition(".")[2]
    ]
    assert found == []


def test_kornia_is_imported_where_pipelines_are_lowered_and_measured_only():
    found = {room(path) for path, tree in trees().items() if any(name.split(".")[0] == "kornia" for name in imported(tree))}
    assert found <= {"fusion", "benchkit"}


def test_triton_is_imported_in_its_folders_alone():
    found = {path.parent for path, tree in trees().items() if any(name.split(".")[0] == "triton" for name in imported(tree))}
    folder = PACKAGE / "fusion" / "backends" / "triton"
    assert found == {folder, folder / "filters"}


def test_one_file_knows_of_streams_and_events():
    def named(tree):
        for node in nodes(tree):
            if isinstance(node, ast.Attribute) and node.attr in last_parts:
                yield ast.unparse(node)
        yield from imported(tree)

    ends = (
        "cuda.Stream",
        "cuda.Event",
        "cuda.ExternalStream",
        "torch.Stream",
        "torch.Event",
        "cuda.streams",
        "_CudaEventBase",
        "_cuda_setStream",
    )
    last_parts = {end.rpartition(".")[2] for end in ends}
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path, tree in trees().items()
        if room(path) != "benchkit" and any(name.endswith(ends) for name in named(tree))
    }
    assert found == {"core/streams.py"}
