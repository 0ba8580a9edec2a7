"""The rooms of bench/: which may import from which, what they may take of gpuaug, and how large they are."""

import ast
from pathlib import Path

import pytest

import gpuaug
from gpuaug.benchkit import windows

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"
FILES = sorted(BENCH.rglob("*.py"))

MAY_IMPORT = {
    "data": {"data"},
    "harness": {"data", "harness"},
    "figures": {"harness", "figures"},
    "peers": {"data", "harness", "peers"},
    "suites": {"data", "harness", "figures", "peers"},
    "__init__": set(),
    "__main__": {"suites"},
}
"""A suite imports from no other suite. ``__main__`` imports the modules of its commands by name."""

KIT = windows.__name__.rpartition(".")[0]
"""The measuring kit, which is public to bench/."""

PRIVATE = {
    ("bench/suites/training/encoder_decoder.py", "Lane"),
    ("bench/suites/training/encoder_decoder.py", "Lanes"),
    ("bench/suites/transport/chaos.py", "cpu"),
}
"""(file, name) of what is imported although it is not public: a suite measures loaders that share their lanes, and one delays
the threads that decode."""

MOST_FILES, MOST_LINES = 16, 350


def relative(path):
    return str(path.relative_to(ROOT))


def room(path):
    return path.relative_to(BENCH).parts[0].removesuffix(".py")


def imported(path):
    """(module, name) of every import in a file, within functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            yield from ((node.module, alias.name) for alias in node.names)


def modules(path):
    """The files of bench/ that a file imports."""
    for module, name in imported(path):
        if module.split(".")[0] == "bench":
            parts = [*module.split("."), *([name] if name else [])]
            candidates = (
                Path(*parts).with_suffix(".py"),
                Path(*parts[:-1]).with_suffix(".py"),
                Path(*parts[:-1], "__init__.py"),
            )
            yield next(ROOT / file for file in candidates if (ROOT / file).is_file())


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_rooms_import_one_way(path):
    assert {room(module) for module in modules(path)} <= MAY_IMPORT[room(path)]


def test_rooms_themselves_are_in_an_order():
    placed = set()
    for name, needs in MAY_IMPORT.items():
        assert needs - {name} <= placed, f"{name} needs what comes after it"
        placed.add(name)


def test_files_import_each_other_in_no_cycle():
    needs = {path: set(modules(path)) for path in FILES}
    while ready := [path for path, files in needs.items() if not files & set(needs)]:
        for path in ready:
            del needs[path]
    assert not needs, f"in a cycle, or above one: {', '.join(map(relative, needs))}"


def test_only_public_names_of_gpuaug_are_imported():
    found = set()
    for path in FILES:
        for module, name in imported(path):
            if module.split(".")[0] != "gpuaug" or module == KIT or module.startswith(f"{KIT}."):
                continue
            if module != "gpuaug" or name not in {None, *gpuaug.__all__}:
                found.add((relative(path), name))
    assert found == PRIVATE


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_only_public_names_of_gpuaug_are_read(path):
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "gpuaug"}
    assert read <= set(gpuaug.__all__)


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in FILES + sorted((ROOT / "tests/bench").rglob("*.py"))}), ids=relative
)
def test_folders_are_small(folder):
    assert len(list(folder.glob("*.py"))) <= MOST_FILES


@pytest.mark.parametrize("path", FILES + sorted((ROOT / "tests/bench").rglob("*.py")), ids=relative)
def test_files_are_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
