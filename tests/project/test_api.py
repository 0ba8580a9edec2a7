"""The public interface, listed in ``api.txt``. A change of this file is a change of the interface and belongs in CHANGELOG."""

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Literal, get_origin

import pytest
from support.messages.finder import nodes, sources

import gpuaug
from gpuaug.core import errors
from gpuaug.fusion.explain import Line
from gpuaug.loader.checkpoint import Progress
from gpuaug.profiler.measure import Spread

LISTING = Path(__file__).with_name("api.txt")


def signature(function):
    found = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty)).replace("Ellipsis", "…")


def inventory():
    """The public interface: {name: signature, base classes of an error, or ``property``}."""
    found = integrations()
    for name in gpuaug.__all__:
        value = getattr(gpuaug, name)
        if inspect.isclass(value) and issubclass(value, BaseException):
            found[name] = ", ".join(base.__name__ for base in value.__bases__)
            continue
        found[name] = signature(value)
        for member, what in vars(value).items():
            if member.startswith("_"):
                continue
            if isinstance(what, property):
                found[f"{name}.{member}"] = "property"
            elif inspect.isfunction(what):
                found[f"{name}.{member}"] = signature(what)
    return found


def integrations():
    """Signatures of ``gpuaug.integrations``, whose frameworks may be missing."""
    found = {}
    for path in (PACKAGE / "integrations").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                made = next((each for each in ast.walk(node) if getattr(each, "name", "") == "__init__"), node)
                for argument in (*made.args.args, made.args.kwarg):
                    if argument is not None:
                        argument.annotation = None
                found[f"integrations.{path.stem}.{node.name}"] = f"({ast.unparse(made.args)})"
    return found


def test_the_public_interface_equals_its_listing():
    assert sorted(f"{name}: {what}" for name, what in inventory().items()) == LISTING.read_text().splitlines()


def test_public_names_are_listed_in_order_and_once():
    assert sorted(gpuaug.__all__) == gpuaug.__all__
    assert len(set(gpuaug.__all__)) == len(gpuaug.__all__)


def test_every_public_name_says_where_it_is_from_and_what_it_is():
    for name in gpuaug.__all__:
        value = getattr(gpuaug, name)
        assert value.__doc__, name
        assert value.__module__.startswith("gpuaug."), name


PACKAGE = Path(gpuaug.__file__).parent
BUILT = (
    *("CopyPaste", "FeatureStage", "FixedSizeCrop", "MixUpBoxes", "Mosaic", "PadIfSmaller", "Stage", "StreamedLoader"),
    "TransformStage",
)
"""Classes that a user constructs, or derives from. Others are returned, and have fields, properties and methods to read."""
RECORDS = [kind for name in gpuaug.__all__ if dataclasses.is_dataclass(kind := getattr(gpuaug, name))] + [Line, Spread]
"""Dataclasses that a user is given, those included that are fields of others."""


def documented():
    """What a user meets by name, each with the docstrings that describe it: its own, and those of what it overrides."""
    for name in gpuaug.__all__:
        value = getattr(gpuaug, name)
        yield name, (value, [value.__doc__])
        bases = [base for base in getattr(value, "__mro__", ()) if base.__module__.startswith("gpuaug.")]
        for member in dict.fromkeys(member for base in bases for member in vars(base)):
            what = inspect.getattr_static(value, member)
            what = getattr(what, "fget", what)  # of a property
            if inspect.isfunction(what) and (not member.startswith("_") or member == "__getitem__"):
                yield f"{name}.{member}", (what, [vars(base)[member].__doc__ for base in bases if member in vars(base)])
    for member in ("state_dict", "load_state_dict"):  # a loader has these around one that has them
        yield f"StreamedLoader.{member}", (getattr(Progress, member), [getattr(Progress, member).__doc__])


DOCUMENTED = dict(documented())
CALLED = [name for name, (value, _) in DOCUMENTED.items() if inspect.isfunction(value) or name in BUILT]


def sections(docstring):
    """The sections of a Google docstring, by name. The first one, without a name, says what it is."""
    parts = re.split(r"^([A-Z]\w+):$", inspect.cleandoc(docstring or ""), flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def entries(text):
    """What a section describes: ``name: …`` or ``one, other: …``."""
    found = re.findall(r"^    [-* ]*(\w+(?:, \w+)*):", text, flags=re.MULTILINE)
    return {name for entry in found for name in entry.split(", ")}


def test_everything_public_says_what_it_is():
    assert [name for name, (_, texts) in DOCUMENTED.items() if not any(sections(text)[""] for text in texts)] == []


def test_every_argument_and_result_is_described():
    for name in CALLED:
        value, docstrings = DOCUMENTED[name]
        called = inspect.signature(value)
        taken = {argument for argument in called.parameters if argument != "self"}
        described = [sections(docstring) for docstring in docstrings]
        assert taken in [entries(each.get("Args", "")) for each in described], name
        if taken and inspect.isfunction(value) and called.return_annotation is not None:
            assert any("Returns" in each or "returns" in entries(each.get("Shape", "")) for each in described), name


def test_what_is_called_first_says_what_it_costs_and_shows_how():
    for name in set(CALLED) & set(gpuaug.__all__) - {"Stage"}:
        assert {"Args", "Raises", "Cost", "Examples"} <= sections(DOCUMENTED[name][1][0]).keys(), name


API_PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


def annotations(value):
    """{annotation as it is written: its value} of the arguments of a function or a class."""
    function = inspect.unwrap(value.__init__ if inspect.isclass(value) else value)
    definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    written = [node.annotation for node in ast.walk(definition.args) if isinstance(node, ast.arg) and node.annotation]
    names = [ast.unparse(node) for part in written for node in ast.walk(part) if isinstance(node, ast.Name | ast.Attribute)]
    return {name: eval(name, function.__globals__) for name in names}


def test_signatures_show_values_and_not_the_names_of_private_aliases():
    """The API page prints annotations as they are written, so an alias in them must have an entry on the page."""
    for name in {*CALLED, "DecodeStage", "Fused"}:
        values = annotations(DOCUMENTED[name][0])
        aliases = {alias for alias, value in values.items() if get_origin(value) in (Literal, UnionType, Callable)}
        assert {alias for alias in aliases if f".{alias.rpartition('.')[2]}\n" not in API_PAGE} == set(), name


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_every_field_is_described(kind):
    body = ast.parse(inspect.getsource(kind)).body[0].body
    described = {
        node.target.id
        for node, after in pairwise(body)
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }
    fields = {field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")}
    assert fields <= described | entries(sections(kind.__doc__).get("Shape", ""))


def raising():
    """What others may call, in the whole tree, with the errors that it raises itself."""
    for path, tree in sources("gpuaug"):
        owners = {id(each): node for node in nodes(tree) if isinstance(node, ast.ClassDef) for each in node.body}
        for node in (node for node in nodes(tree) if isinstance(node, ast.FunctionDef)):
            owner = owners.get(id(node))
            if re.match(r"_(?!_)", node.name) or (owner and owner.name.startswith("_")):
                continue
            raised = [each.exc for each in nodes(node) if isinstance(each, ast.Raise) and isinstance(each.exc, ast.Call)]
            if kinds := {ast.unparse(each.func) for each in raised} & vars(errors).keys():
                described = owner if node.name in ("__init__", "__post_init__") else node
                yield f"{path}:{described.name}", described, kinds


def test_errors_are_described_where_they_are_raised():
    left_out, number = {}, 0
    for name, node, kinds in raising():
        _, _, described = (ast.get_docstring(node) or "").partition("Raises:\n")
        number += 1
        if missing := kinds - set(re.findall(r"\w+", described)):
            left_out[name] = missing
    assert left_out == {}
    assert number >= 80


def test_the_version_is_that_of_the_package():
    assert gpuaug.__version__ == metadata.version("gpuaug")
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", gpuaug.__version__)
