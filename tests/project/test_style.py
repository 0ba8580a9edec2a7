"""Lint, formatting and types, as part of the one command that tests everything."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.messages.finder import nodes_of
from support.public import typed_program
from torch.utils._device import _device_constructors

ROOT = Path(__file__).parents[2]

LEFT_ALONE = (
    *("gpuaug/core/streams.py", "gpuaug/core/batch.py", "gpuaug/feed/ring", "gpuaug/stages/selection.py"),
    *("gpuaug/decode/decoder.py", "gpuaug/decode/nvjpeg.py", "gpuaug/decode/stage.py", "gpuaug/decode/layout.py"),
    *("gpuaug/decode/decoders/engines.py", "gpuaug/decode/decoders/hybrid.py"),
)
"""Files whose races are proven by exhaustive tests or by runs on a GPU, which no matter of style alone changes."""


@pytest.mark.timeout(1800)  # half a minute of one core without a cache, of which a busy machine may give a tenth
@pytest.mark.parametrize("command", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]], ids=" ".join)
def test_style(command):
    pytest.importorskip(command[0])
    if command == ["mypy"] and torch.__version__.startswith("2.8."):
        pytest.skip("the oldest torch calls 1 - tensor of any type")
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr


def packed(nodes):
    """Assignments in functions and classes of several values of different forms that do not depend on one another."""
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            targets, values = node.targets[0].elts, node.value.elts
            read = {ast.unparse(part) for value in values for part in ast.walk(value)}
            alone = len(targets) == len(values) and not read & {ast.unparse(target) for target in targets}
            alone &= not any(isinstance(each, ast.Starred) for each in (*targets, *values))
            if node.col_offset and alone and len({form(value) for value in values}) > 1:
                yield node


def form(value):
    """The syntax of a value without its names and constants."""
    if isinstance(value, ast.Constant | ast.Name | ast.Attribute):
        return type(value) is ast.Constant
    return type(value), *(form(part) for part in ast.iter_child_nodes(value) if isinstance(part, ast.expr))


@pytest.mark.parametrize("room", ["gpuaug", "bench"])
def test_one_assignment_states_one_fact(room):
    found = [f"{path}:{node.lineno}: {ast.unparse(node)}" for path, nodes in nodes_of(room) for node in packed(nodes)]
    assert [each for each in found if not each.startswith(LEFT_ALONE)] == []


FACTORIES = {function.__name__ for function in _device_constructors() if getattr(torch, function.__name__, None) is function}
"""Functions of torch whose result is on the default device unless they get one."""

OF_DEFAULT_DTYPE = {"empty", "eye", "linspace", "ones", "zeros"}
"""Some of them, whose result has the default dtype unless they get one."""

DEFAULT_IS_MEANT = ("torch.empty(0)", "torch.empty(1, ", "torch.empty(shape, device='meta')", "torch.ones(1, ")
"""Calls for the default device itself, for a device alone, or for strides."""


def test_tensors_do_not_depend_on_default_device_and_dtype():
    found = []
    for path, nodes in nodes_of("gpuaug"):
        for node in nodes:
            call = ast.unparse(node) if isinstance(node, ast.Call) else ""
            name = ast.unparse(node.func).removeprefix("torch.") if call.startswith("torch.") else ""
            required = {"device"} | ({"dtype"} if name in OF_DEFAULT_DTYPE else set())
            named = {keyword.arg for keyword in node.keywords} if name in FACTORIES else required
            if not required <= named and None not in named and not call.startswith(DEFAULT_IS_MEANT):
                found.append(f"{path}:{node.lineno}: {call}")
    assert found == []


KEPT_ERRORS = {("gpuaug/feed/stateful.py", "state"), ("gpuaug/loader/checkpoint.py", "position.source")}
"""Errors that belong to the state of a loader, which keeps them after they were raised."""


def test_no_variable_holds_an_error_that_is_raised():
    """The error holds its frames by the traceback, and would hold itself: nothing would be freed until a garbage collection."""
    found = []
    for path, nodes in nodes_of("gpuaug"):
        raised_and_deleted = {
            (inner, ast.unparse(target))
            for node in nodes
            if isinstance(node, ast.Try)
            for statement in node.finalbody
            for target in (statement.targets if isinstance(statement, ast.Delete) else ())
            for inner in node.body
        }
        for node in nodes:
            name = ast.unparse(node.exc) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.expr) else ""
            is_variable = name and not isinstance(node.exc, ast.Call) and not name[0].isupper()
            is_freed = (node, name.partition(".")[0]) in raised_and_deleted or (str(path), name) in KEPT_ERRORS
            if is_variable and not is_freed:
                found.append(f"{path}:{node.lineno}: raise {name}")
    assert found == []


NOT_OURS = {
    *(
        "_repr_html_",
        "_repr_png_",
        "_fields",
        "_version",
        "_parameters",
        "_index_sampler",
        "_iterator",
        "_lock",
    ),  # Python, torch
    *("_fill", "_magnitude", "_crop"),  # transforms of torchvision and Kornia
    *("_block", "_pools", "_streams"),  # doubles in tests/support
}
"""Private names that the package has as well, as tests use them."""
HOMES = ("tests/protocol/", "tests/support/")
"""Folders whose tests and helpers may look at private parts: the others call ``tests/support/internals.py``."""


def private_names():
    """Private names that the package defines."""
    for _, nodes in nodes_of("gpuaug"):
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.attr if isinstance(node, ast.Attribute) else node.id


def private_uses(names):
    """Attributes and imports of the tests that have one of these names."""
    for path, nodes in nodes_of("tests"):
        for node in nodes:
            if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) not in ("self", "cls"):
                yield f"{path}:{node.lineno}: {node.attr}"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gpuaug"):
                yield from (f"{path}:{node.lineno}: {each.name}" for each in node.names if each.name in names)


def test_private_names_of_the_package_are_few_in_tests():
    names = {name for name in private_names() if name.startswith("_") and not name.startswith("__")} - NOT_OURS
    found = list(private_uses(names))
    assert len(found) <= 179, found
    assert len([use for use in found if not use.startswith(HOMES)]) <= 96, found


@pytest.mark.frameworks
@pytest.mark.timeout(1800)
def test_typed_program_is_right_for_pyright():
    pytest.importorskip("basedpyright")
    command = [sys.executable, "-m", "basedpyright", "--project", "pyproject.toml", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr


def test_typed_program_that_mypy_reads_runs():
    assert typed_program.main().batches == 4
