"""Errors of gpuaug's own: what they are, and that each says what to do."""

import ast
from pathlib import Path

import pytest

import gpuaug
from gpuaug.core import errors

KINDS = {
    "ArgumentError": ValueError,
    "ArgumentTypeError": TypeError,
    "SelectionError": LookupError,
    "DeviceError": RuntimeError,
    "IteratorEndedError": RuntimeError,
}


@pytest.mark.parametrize(("name", "builtin"), KINDS.items())
def test_an_error_can_be_caught_as_gpuaugs_and_as_pythons(name, builtin):
    kind = getattr(gpuaug, name)
    assert issubclass(kind, gpuaug.GpuAugError)
    assert issubclass(kind, builtin)
    with pytest.raises(builtin, match="text"):
        raise kind("text")


def test_a_warning_is_a_users_and_no_error():
    assert issubclass(gpuaug.GpuAugWarning, UserWarning)
    assert not issubclass(gpuaug.GpuAugWarning, gpuaug.GpuAugError)


def test_every_error_is_public():
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert defined == {*KINDS, "GpuAugError", "GpuAugWarning"}
    assert defined <= set(gpuaug.__all__)


def templates(node, constants):
    """The texts that an expression may give, with ``…`` for what is filled in."""
    if isinstance(node, ast.IfExp):
        return templates(node.body, constants) + templates(node.orelse, constants)
    if isinstance(node, ast.Name) and node.id in constants:
        return templates(constants[node.id], constants)
    if isinstance(node, ast.JoinedStr):
        return ["".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)]
    return [str(node.value) if isinstance(node, ast.Constant) else "…"]


def messages():
    """Every message that the package gives, and where."""
    names = {*KINDS, "GpuAugWarning"}
    for path in sorted(Path(gpuaug.__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text())
        constants = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
        for name, value in constants.items():
            if isinstance(value, ast.Constant) and ", got " in str(value.value):
                yield pytest.param(value.value, id=f"{path.name}:{name}")
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = node.func.id if isinstance(node.func, ast.Name) else None
            warned = any(isinstance(argument, ast.Name) and argument.id in names for argument in node.args[1:])
            if called in names or warned:
                for text in set(templates(node.args[0], constants)) - {"…"}:
                    yield pytest.param(text, id=f"{path.name}:{node.lineno}")


@pytest.mark.parametrize("text", list(messages()))
def test_every_text_says_what_must_be_what_is_and_the_way_out(text):
    what, must, rest = text.partition(" must ")
    assert what
    assert must, "what must be so?"
    rule, got, rest = rest.partition(", got ")
    assert rule
    assert got, "what is it instead?"
    value, stop, way_out = rest.partition(". ")
    assert value
    assert stop, "what is the way out?"
    assert way_out
    assert way_out[0].isupper() or way_out[0] in "'…"
    assert way_out.endswith((".", "…"))


def test_there_are_texts_to_look_at():
    assert len(list(messages())) >= 30
