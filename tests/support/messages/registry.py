"""Examples of the advice in messages: each makes the mistake, reads the message and does what it says."""

import ast
import functools
import importlib
import inspect
import re
import textwrap
import warnings

import torch
from support.messages.finder import KINDS, ROOT, sites

import gpuaug

FOLDER = ROOT / "tests/messages/examples"
PACKAGE = f"{ROOT / 'gpuaug'}/"
EXAMPLES = {}
"""Example functions by their name."""
UNTRIED = {
    "Images are not decoded while a model trains": "needs a GPU",
    "A worker could not send a batch": "needs a machine without memory; see tests/feed/ring/test_exhausted_resources.py",
    "Copies of batches make the training thread wait": "needs a GPU; see tests/feed/test_ring.py",
    "got a DataLoaderDispatcher": "needs ranks; see tests/frameworks/test_accelerate.py",
    "The optimizer makes no step for the last": "needs ranks; see tests/frameworks/test_accelerate.py",
    "Each of … ranks reads all": "needs ranks; see tests/loader/test_sharding.py",
    "This iterator cannot be read here": "needs a forked process; see tests/contract/test_threads.py",
    "A batch cannot be moved to": "needs a GPU",
    "The copy of a batch does not overlap with training": "needs a GPU",
    "because a CUDA graph cannot hold its encoder": "needs a GPU",
    "run without CUDA graphs, because a graph of": "needs a GPU",
    "Freeze all parameters with ….requires_grad_(False)": "followed in tests/stages/test_feature.py",
    "Move the encoder with ….to(…)": "followed in tests/stages/test_feature.py",
    "encoder must not write to its input": "followed in tests/stages/test_bad_encoders.py",
    "labels no longer match the images": "followed in tests/stages/test_hints.py",
    "… no longer match the images": "followed in tests/stages/test_targets_left_behind.py",
    "Images of shape … are read with": "followed in tests/stages/test_hints.py",
    "transform must accept images of different sizes": "followed in tests/stages/test_hints.py",
    "Put v2.ToDtype(torch.float32, scale=True) before it": "followed in tests/fusion/test_types.py",
    "next() cannot run": "followed in tests/contract/test_threads.py",
    "This iterator ended, because a newer one took over": "followed in tests/contract/test_leaving.py",
    "This iterator ended, because its loader was closed": "followed in tests/contract/test_leaving.py",
    "To resume with different batches, pass strict=False": "followed in tests/loader/test_agreement.py",
    "Finish its loop first, or close() the loader": "followed in tests/viewer/test_inspection.py",
    "close() cannot run": "followed in tests/loader/test_submitted.py",
    "Pass all keys that hold one entry per box: per_box=": "followed in tests/fusion/forms/test_sanitize.py",
    "Give it p=1.0, or resize before it": "followed in tests/fusion/test_views.py",
}
"""Reasons for messages without an example, by a part of the message."""
CODE = re.compile(r"([A-Za-z_]\w*)(?:=(?!=)|\(|\[)")
"""Names in advice that is code: what is called, indexed or given a value."""


def example(*parts):
    """Register a function as the example of the messages that contain each of these parts."""

    def register(function):
        known = EXAMPLES.get(function.__name__, function)  # pytest imports each file twice, to look for doctests
        assert known.__code__.co_filename == function.__code__.co_filename, f"two examples {function.__name__}"
        EXAMPLES[function.__name__] = function
        function.parts = parts
        return function

    return register


@functools.cache
def load():
    """Import every example."""
    for path in sorted(FOLDER.glob("*.py")):
        importlib.import_module(f"messages.examples.{path.stem}")


@functools.cache
def texts():
    """Every text of the package."""
    return tuple(dict.fromkeys(text for site in sites() if site.where.startswith("gpuaug") for text in site.listed))


@functools.cache
def having(part):
    """The texts that contain a part."""
    return tuple(text for text in texts() if part in text)


@functools.cache
def _patterns():
    whole = sorted(texts(), key=lambda text: -len(text.replace("…", "")))
    return {text: re.compile(re.escape(text).replace("…", ".*"), re.DOTALL) for text in whole}


def text_of(message):
    """The text that a message is, with values filled in: of several, the one with most words of its own."""
    return next((text for text, pattern in _patterns().items() if pattern.fullmatch(message)), None)


def advice_of(text):
    """The part of a text that says what to do."""
    begin = re.search(r", (got|because) .*?(?<!\bv1)\.(?=\s|$)", text)
    return text[begin.end() :].strip() if begin else text


def has_code(text):
    """Whether a text prints code to write."""
    return bool(CODE.search(advice_of(text)))


def covered():
    """Names of the examples of each text, and the reasons for those without."""
    load()
    names = {}
    for name, function in EXAMPLES.items():
        for part in function.parts:
            for text in having(part):
                names.setdefault(text, []).append(name)
    return names, {text: reason for part, reason in UNTRIED.items() for text in having(part)}


class Told:
    """``with told:`` around a mistake expects the message that the example is for, as an error, a note or a warning."""

    def __init__(self, parts):
        self.parts, self.read, self.last = parts, set(), ""

    def __enter__(self):
        self._warnings = warnings.catch_warnings(record=True)
        self._caught = self._warnings.__enter__()
        warnings.simplefilter("always")

    def __exit__(self, kind, error, traceback):
        self._warnings.__exit__(None, None, None)
        if isinstance(error, KeyboardInterrupt | AssertionError):
            return False
        told = [each for each in self._caught if issubclass(each.category, gpuaug.GpuAugWarning)]
        assert not [each for each in told if each.filename.startswith(PACKAGE)], "a warning is about a line of the user"
        messages = [str(each.message) for each in told]
        if error is not None:
            text = text_of(str(error))
            kinds = {site.kind for site in sites() if text in site.listed} & KINDS.keys()
            assert not kinds or type(error).__name__ in kinds
            messages += [str(error), *getattr(error, "__notes__", [])]
        found = {part for message in messages for part in self.parts if part in (text_of(message) or "")}
        assert found, f"told {messages or error!r}, for {self.parts}"
        self.last = next(message for message in messages if any(part in (text_of(message) or "") for part in found))
        self.read |= found
        return True


def run(name):
    """Run an example: the mistake gives the message, and what it advises works without a word."""
    function = EXAMPLES[name]
    told = Told(function.parts)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=()):
        warnings.simplefilter("error", gpuaug.GpuAugWarning)
        torch.manual_seed(0)
        function(told)
    assert told.read == set(function.parts), f"not told: {set(function.parts) - told.read}"


def code_left_out(name):
    """Names in the code that the advice prints and that the example does not use."""
    function = EXAMPLES[name]
    source = textwrap.dedent(inspect.getsource(function))
    (tree,) = ast.parse(source).body
    body = ast.unparse(ast.Module(tree.body, []))
    missing = {}
    for part in function.parts:
        ways = [set(CODE.findall(advice_of(text))) for text in having(part)]
        found = min((way - set(re.findall(r"\w+", body)) for way in ways), key=len, default=set())
        if found:
            missing[part] = sorted(found)
    return missing
