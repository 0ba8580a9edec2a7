"""Errors of gpuaug's own: what they are, that each says what to do, and that a test reads each."""

import ast
import builtins
import re
import tomllib
from collections import Counter, defaultdict
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from support.messages import registry
from support.messages.finder import KINDS, ROOT, literal, no_garbage_collection, nodes_of, sites

import gpuaug
from gpuaug.core import errors


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


@pytest.mark.parametrize("file", ["train.py", "<stdin>", "<ipython-input-1-0123456789ab>"])
def test_a_warning_is_about_the_line_of_the_user_that_runs(file):
    code = "def step(warn):\n    with ExitStack() as stack:\n        stack.callback(warn, 'text')\n"  # left at line 2
    exec(compile(code, file, "exec"), names := {"ExitStack": ExitStack})
    with pytest.warns(gpuaug.GpuAugWarning) as told:
        names["step"](errors.warn)
    assert (told[0].filename, told[0].lineno) == (file, 2)


def test_every_error_is_public():
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert defined == {*KINDS, "GpuAugError", "GpuAugWarning"}
    assert defined <= set(gpuaug.__all__)


ARGUMENT = re.compile(r"[^.]*? must .+?, got .+?\. (?P<way_out>.+)", re.DOTALL)
EVENT = re.compile(r".+?, because .+?\. (?P<way_out>.+)", re.DOTALL)
OF_EVENTS = {"GpuAugWarning", "GpuAugError", "DecodeError", "IteratorEndedError"}
"""Classes whose texts are about no argument that the user passed. ``ArgumentError`` and ``DeviceError`` may be about either."""
OF_ARGUMENTS = {"ArgumentTypeError", "SelectionError"}
NO_SENTENCE = {"note"}


def test_every_text_is_about_an_argument_or_about_an_event():
    """In one test, not in one for each text, so that the source is read when it runs, and not by every worker."""
    told = [(site, text) for site in sites() if site.kind not in NO_SENTENCE for text in site.texts]
    faults = [f"{site.where}: {text}: {found}" for site, text in told if (found := fault(site.kind, text))]
    assert told
    assert faults == []


def fault(kind, text):
    """What is wrong with the form of a text, or an empty string."""
    argument, event = ARGUMENT.fullmatch(text), EVENT.fullmatch(text)
    if (argument is None) == (event is None):
        return "<what> must be <rule>, got <value>. or <what happened>, because <why>."
    if argument and kind in OF_EVENTS:
        return "say what happened, and why"
    if event and kind in OF_ARGUMENTS:
        return "say what must be, and what is"
    way_out = (argument or event)["way_out"]
    begins_and_ends = (way_out[0].isupper() or way_out[0] in "'…") and way_out.endswith((".", "…"))
    return "" if begins_and_ends else "the way out is a sentence"


def test_links_lead_to_the_documentation():
    texts = [text for site in sites() if site.where.startswith("gpuaug") for text in site.listed]
    assert [text for text in texts if re.search(r"https?:|\bdocs/", text)] == [], "links are made with DOCUMENTATION"
    assert f"site_url: {errors.DOCUMENTATION}\n" in (ROOT / "mkdocs.yml").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Documentation"] == errors.DOCUMENTATION


def test_every_site_has_a_text_that_can_be_read_here():
    assert [site.where for site in sites() if not site.listed and not site.passes_on] == []


def test_there_are_texts_to_look_at_in_every_folder():
    found = Counter(Path(site.where).parts[0] for site in sites())
    assert found["gpuaug"] >= 140
    assert found["bench"] >= 10
    assert {len(Path(site.where).parts) for site in sites()} > {2}, "folders within the package are looked at"


def test_the_package_raises_and_warns_by_its_own_classes():
    # What Python raises of itself cannot be told from the user's own errors.
    foreign = []
    for path, nodes in nodes_of("gpuaug"):
        for node in nodes:
            kind = node.exc.func if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) else None
            # ``hasattr`` needs an AttributeError from a ``__getattr__``, which raises no other error.
            if isinstance(kind, ast.Name) and hasattr(builtins, kind.id) and kind.id != "AttributeError":
                foreign.append(f"{path}:{node.lineno} raises {kind.id}")
            called = node.func if isinstance(node, ast.Call) else None
            warns = isinstance(called, ast.Attribute) and called.attr == "warn" and ast.unparse(called) == "warnings.warn"
            if warns and Path(path).name != "errors.py":
                foreign.append(f"{path}:{node.lineno} warns without errors.warn")
    assert foreign == []


def runs_of_three(text):
    """Each three words in a row, with no filled-in value between them."""
    for part in text.split("…"):
        words = re.findall(r"[\w']+", part)
        yield from zip(words, words[1:], words[2:], strict=False)


@cache
@no_garbage_collection()
def texts_in_tests():
    """The strings of the tests that are texts of errors, or patterns for them, with ``…`` for what may be anything."""
    found = set()
    for _, nodes in nodes_of("tests"):
        inner = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in inner | prose:
                pattern = re.sub(r"\\[dswDSW][+*?]*|\.[*+]\??", "…", literal(node))
                found.add(re.sub(r"^\^|\$$|\\(?=\W)", "", pattern))
    return {text for text in found if re.search(r"\w \w+ \w", text)}


def test_a_test_reads_each_text_of_the_package():
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
        if re.search(r"\b(must|got|because)\b", given):
            read |= {next((text for text in whole if patterns[text].fullmatch(given)), "")}
    examples, _ = registry.covered()
    read |= {text for text, pattern in patterns.items() if any(map(pattern.fullmatch, examples))}
    unread = {
        f"{site.where}: {text}"
        for site in sites()
        for text in site.texts
        if site.where.startswith("gpuaug") and text not in read and any(runs_of_three(text))
    }
    assert sorted(unread) == []
