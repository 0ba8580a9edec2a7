"""Errors of gpuaug's own: what they are, that each says what to do, and that a test reads each."""

import ast
import builtins
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import gpuaug
from gpuaug.core import errors

ROOT = Path(__file__).parents[2]
KINDS = {
    "ArgumentError": ValueError,
    "ArgumentTypeError": TypeError,
    "SelectionError": LookupError,
    "DecodeError": ValueError,
    "DeviceError": RuntimeError,
    "IteratorEndedError": RuntimeError,
}
SCRIPTS = {"SystemExit", "ValueError", "FileNotFoundError"}
"""What the scripts of ``bench/`` raise: whoever runs one reads the text, and catches nothing."""


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
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert defined == {*KINDS, "GpuAugError", "GpuAugWarning"}
    assert defined <= set(gpuaug.__all__)


class Site(NamedTuple):
    """A place that raises, warns, or ends a command."""

    where: str
    texts: list[str]
    """What it may say, with ``…`` for each value that is filled in."""
    passes_on: bool
    """Whether it passes on the text of an error that it has caught."""


def sources(folder):
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield path.relative_to(ROOT), ast.parse(path.read_text())


def templates(node, assigned, seen=()):
    """The texts that an expression may give, with ``…`` for what is filled in."""
    name = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else None
    if name in assigned and name not in seen:
        return [text for value in assigned[name] for text in templates(value, assigned, (*seen, name))]
    if isinstance(node, ast.IfExp):
        return templates(node.body, assigned, seen) + templates(node.orelse, assigned, seen)
    if isinstance(node, ast.BoolOp):
        return [text for value in node.values for text in templates(value, assigned, seen)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        ends = templates(node.right, assigned, seen)
        return [text + end for text in templates(node.left, assigned, seen) for end in ends]
    if isinstance(node, ast.JoinedStr):
        return ["".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)]
    return [node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "…"]


def texts_of(path, tree, raised):
    """The sites of one file."""
    assigned, caught = defaultdict(list), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                assigned[ast.unparse(target)].append(node.value)
        elif isinstance(node, ast.ExceptHandler):
            caught |= {id(each) for each in ast.walk(node) if isinstance(each, ast.Name) and each.id == node.name}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func)
            warned = "GpuAugWarning" in map(ast.unparse, node.args[1:])
            if called.rpartition(".")[2] in raised or warned or called == "parser.error":
                texts = [text for text in dict.fromkeys(templates(node.args[0], assigned)) if re.search(r"\w", text)]
                passes_on = any(id(each) in caught for each in ast.walk(node.args[0]))
                yield Site(f"{path}:{node.lineno}", texts, passes_on)


@cache
def sites():
    """Every place of the tree that gives a user a text."""
    found = []
    for folder, raised in (("gpuaug", {*KINDS, "GpuAugError"}), ("bench", {*KINDS, *SCRIPTS})):
        for path, tree in sources(folder):
            found += texts_of(path, tree, raised)
    return found


@pytest.mark.parametrize("text", [pytest.param(text, id=site.where) for site in sites() for text in site.texts])
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


def test_every_site_has_a_text_that_can_be_read_here():
    assert [site.where for site in sites() if not site.texts and not site.passes_on] == []


def test_there_are_texts_to_look_at_in_every_folder():
    found = Counter(Path(site.where).parts[0] for site in sites())
    assert found["gpuaug"] >= 140
    assert found["bench"] >= 10
    assert {len(Path(site.where).parts) for site in sites()} > {2}, "folders within the package are looked at"


def test_the_package_raises_and_warns_by_its_own_classes():
    # What Python raises of itself cannot be told from the user's own errors.
    foreign = []
    for path, tree in sources("gpuaug"):
        for node in ast.walk(tree):
            kind = node.exc.func if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) else None
            if isinstance(kind, ast.Name) and hasattr(builtins, kind.id):
                foreign.append(f"{path}:{node.lineno} raises {kind.id}")
            warns = isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn"
            if warns and "GpuAugWarning" not in map(ast.unparse, node.args[1:2]):
                foreign.append(f"{path}:{node.lineno} warns by another class")
    assert foreign == []


def runs_of_three(text):
    """Each three words in a row, with no filled-in value between them."""
    for part in text.split("…"):
        words = re.findall(r"[\w']+", part)
        yield from zip(words, words[1:], words[2:], strict=False)


@cache
def texts_in_tests():
    """The strings of the tests that are texts of errors, or patterns for them, with ``…`` for what may be anything."""
    found = set()
    for _, tree in sources("tests"):
        inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in inner | prose:
                pattern = re.sub(r"\\[dswDSW][+*?]*|\.[*+]\??", "…", *templates(node, {}))
                found.add(re.sub(r"^\^|\$$|\\(?=\W)", "", pattern))
    return {text for text in found if re.search(r"\b(must|got)\b", text)}


def test_a_test_reads_each_text():
    texts = {text for site in sites() for text in site.texts}
    told_by = defaultdict(set)
    for text in texts:
        for run in runs_of_three(text):
            told_by[run].add(text)
    whole = sorted(texts, key=lambda text: -len(text.replace("…", "")))
    patterns = {text: re.compile(re.escape(text).replace("…", ".+")) for text in whole}
    read = set()
    for given in texts_in_tests():
        # Words that no other text has; or all of one, which may be what another text is with a value filled in.
        read |= {text for run in runs_of_three(given) if len(told_by[run]) == 1 for text in told_by[run]}
        read |= {next((text for text in whole if patterns[text].fullmatch(given)), "")}
    assert sorted({f"{site.where}: {text}" for site in sites() for text in site.texts if text not in read}) == []
