"""The rooms of bench/: which may import from which, what they may take of gpuaug, and how large they are."""

import ast
from pathlib import Path

import gpuaug
from gpuaug.benchkit import windows

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(BENCH.rglob("*.py"))}

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
    ("bench/suites/augmentation/mosaics.py", "packed_targets"),
    ("bench/suites/training/encoder_decoder.py", "Lane"),
    ("bench/suites/training/encoder_decoder.py", "Lanes"),
    ("bench/suites/training/priorities.py", "streams"),
    ("bench/suites/transport/chaos.py", "cpu"),
}
"""(file, name) of what is imported although it is not public: a suite measures target dicts in the form in which stages get
them, one measures loaders that share their lanes, one sets the priority of lanes, and one delays the threads that decode."""

MAX_FILES, MAX_LINES = 16, 350


def room(path):
    return path.relative_to(BENCH).parts[0].removesuffix(".py")


def imported(path):
    """(module, name) of every import in a file, within functions too."""
    for node in ast.walk(TREES[path]):
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


def test_rooms_import_one_way():
    pairs = {(room(path), room(module)) for path in TREES for module in modules(path)}
    assert {
        (importer, imported_room) for importer, imported_room in pairs if imported_room not in MAY_IMPORT[importer]
    } == set()


def test_files_import_each_other_in_no_cycle():
    needs = {path: set(modules(path)) for path in TREES}
    while ready := [path for path, files in needs.items() if not files & set(needs)]:
        for path in ready:
            del needs[path]
    assert not needs, f"in a cycle, or above one: {', '.join(map(str, needs))}"


def test_only_public_names_of_gpuaug_are_used():
    private_names = set()
    for path, tree in TREES.items():
        names = [name for module, name in imported(path) if module == "gpuaug" and name]
        names += [
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "gpuaug"
        ]
        private = [
            name for module, name in imported(path) if module.startswith("gpuaug.") and not f"{module}.".startswith(f"{KIT}.")
        ]
        private_names |= {(str(path.relative_to(ROOT)), name) for name in [*(set(names) - {*gpuaug.__all__}), *private]}
    assert private_names == PRIVATE


def test_folders_are_small_and_files_are_short():
    folders = [path.parent for path in TREES]
    assert {folder for folder in folders if folders.count(folder) > MAX_FILES} == set()
    assert {path for path in TREES if len(path.read_text(encoding="utf-8").splitlines()) > MAX_LINES} == set()
