"""What a user may rely on. A change of this table is a change of the interface: it belongs into the changelog."""

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

PUBLIC = {
    "ArgumentError": "GpuAugError, ValueError",
    "ArgumentTypeError": "GpuAugError, TypeError",
    "DecodeError": "GpuAugError, ValueError",
    "DecodeStage.decoders": "property",
    "DecodeStage": (
        "(*, on=…, backend='auto', channels=3, min_side=None, scale=None, exif=True, on_error='raise', max_pixels=178956970, "
        "max_bytes=4294967296, "
        "threads=None, name=None)"
    ),
    "DecodeStage.bind": "(self, name, lanes)",
    "DeviceError": "GpuAugError, RuntimeError",
    "Draws": "(shape, _tree, _drawn, _sizes, _more=())",
    "Draws.as_kornia": "(self)",
    "Draws.as_torchvision": "(self)",
    "Draws.of": "(self, sample)",
    "Draws.views": "property",
    "Encoded": "(data, headers)",
    "Encoded.file": "(self, index)",
    "Encoded.pin_memory": "(self)",
    "Explanation": "(lines, shape, executor='', notes=(), dtype=torch.uint8)",
    "Explanation.launches": "property",
    "FeatureStage": (
        "(encoder, *, on=…, into=…, output=None, autocast=None, memory_format=None, capture='auto', graph_bytes=None, "
        "name=None)"
    ),
    "FeatureStage.bind": "(self, name, lanes)",
    "FeatureStage.branches": "property",
    "FeatureStage.capture": "(self, shapes)",
    "FeatureStage.update": "(self)",
    "FixedSizeCrop": "(size, fill=0)",
    "FixedSizeCrop.make_params": "(self, flat_inputs)",
    "FixedSizeCrop.transform": "(self, inpt, params)",
    "Fused": "(pipeline, options)",
    "Fused.draw": "(self, shape, seed=None, *, dtype=None)",
    "Fused.explain": "(self, shape=None, *, dtype=None)",
    "Fused.extra_repr": "(self)",
    "Fused.forward": "(self, *inputs, data_keys=None, draws=None)",
    "Fused.windows_read": "(self, shapes)",
    "GpuAugError": "Exception",
    "GpuAugWarning": "UserWarning",
    "IteratorEndedError": "GpuAugError, RuntimeError",
    "PadIfSmaller": "(size, fill=0)",
    "PadIfSmaller.make_params": "(self, flat_inputs)",
    "PadIfSmaller.transform": "(self, inpt, params)",
    "Part": "(name, wall, host=None, device_ms=None, launches=None, waits_at=None, kind='', runs='', eager=None)",
    "Ragged": "(data, places, shapes)",
    "Ragged.device": "property",
    "Ragged.pin_memory": "(self, *args)",
    "Ragged.to": "(self, device, *, non_blocking=False)",
    "Report": (
        "(parts, in_line, streamed, cached, thread_ms, batch_bytes, pageable_bytes, link_gb_per_s, lanes, settings, "
        "timeline, epoch_ms=0.0, verdict=(), waits_for_loader_ms=(), plain_torch=None, step_first=None)"
    ),
    "Report.bound_ms": "property",
    "Report.copy_gb_per_s": "property",
    "Report.copy_ms": "property",
    "Report.decode_ms": "property",
    "Report.device_ms": "property",
    "Report.exposed_ms": "property",
    "Report.figures": "(self)",
    "Report.full_ms": "property",
    "Report.headspace": "property",
    "Report.host_ms": "property",
    "Report.lines": "(self)",
    "Report.load_ms": "property",
    "Report.overlap_efficiency": "property",
    "Report.part": "(self, name)",
    "Report.rows": "(self)",
    "Report.serial_ms": "property",
    "Report.summary": "(self)",
    "SelectionError": "GpuAugError, LookupError",
    "Span": "(lane, name, batch, start_ms, end_ms, waits=False)",
    "Stage": "(*, on, into, name)",
    "Stage.bind": "(self, name, lanes)",
    "Stats": (
        "(batches=0, copied_bytes=0, depth=0, ready=0, starved=0, starved_ms=0.0, slot_batches=0, other_batches=0, "
        "held_back=0, held_back_ms=0.0, replaced=0, undecoded_pixels=0, decode_waits=0, decode_wait_ms=0.0, "
        "pinned_bytes=0, decode_bytes=0, captured=0, replayed=0, eager=0, graph_bytes=0)"
    ),
    "StreamedLoader": "(loader, stages=(), *, device=None, depth=2, seed=None, rank=None, feed='auto', feed_bytes=None)",
    "StreamedLoader.batch_sampler": "property",
    "StreamedLoader.batch_size": "property",
    "StreamedLoader.close": "(self)",
    "StreamedLoader.dataset": "property",
    "StreamedLoader.depth": "property",
    "StreamedLoader.device": "property",
    "StreamedLoader.drop_last": "property",
    "StreamedLoader.loader": "property",
    "StreamedLoader.multiprocessing_context": "property",
    "StreamedLoader.sampler": "property",
    "StreamedLoader.seed": "property",
    "StreamedLoader.set_epoch": "(self, epoch)",
    "StreamedLoader.skip": "(self, batches)",
    "StreamedLoader.stages": "property",
    "StreamedLoader.stats": "(self)",
    "Timeline": "(spans, device, depth)",
    "Timeline.chrome_trace": "(self)",
    "Timeline.figure": "(self, width_in=12.0)",
    "Timeline.lanes": "(self)",
    "Timeline.save": "(self, path, *, width_in=12.0)",
    "Timeline.title": "(self)",
    "TransformStage": "(transform, *, on=…, into=…, name=None)",
    "TransformStage.bind": "(self, name, lanes)",
    "collate_encoded": "(samples)",
    "collate_ragged": "(samples, *, convert=False, channels=3)",
    "fuse": (
        "(pipeline, *, dtype=None, memory_format=torch.contiguous_format, pick='batch', ragged=False, "
        "antialias=False, views=1, boxes='xyxy', num_classes=None, label_smoothing=0.0)"
    ),
    "profile": "(loader, step, *, batches=40, rounds=3, show=True)",
    "read_clip": "(source, frames=16, stride=1, *, start=None, start_s=None, at=None, times_s=None, short='error')",
    "read_encoded": "(path)",
    "sanitize": "(targets, *, per_box=None)",
    "show": "(loader, n=8)",
    "step_first": "(device=None)",
}

INTEGRATIONS = {
    "accelerate.skip_first_batches": "(dataloader, num_batches=0)",
    "lightning.StreamLoaders": "(self, train=None, validate=None, test=None, **settings)",
}
"""Of ``gpuaug.integrations``, whose frameworks may be missing."""


def signature(function):
    found = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty)).replace("Ellipsis", "…")


def inventory():
    found = {}
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


def test_the_public_interface_is_what_it_was():
    assert inventory() == PUBLIC


def test_the_integrations_are_what_they_were():
    found = {}
    for path in (PACKAGE / "integrations").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                made = next((each for each in ast.walk(node) if getattr(each, "name", "") == "__init__"), node)
                for argument in (*made.args.args, made.args.kwarg):
                    if argument is not None:
                        argument.annotation = None
                found[f"{path.stem}.{node.name}"] = f"({ast.unparse(made.args)})"
    assert found == INTEGRATIONS


def test_public_names_are_listed_in_order_and_once():
    assert sorted(gpuaug.__all__) == gpuaug.__all__
    assert len(set(gpuaug.__all__)) == len(gpuaug.__all__)


def test_every_public_name_says_where_it_is_from_and_what_it_is():
    for name in gpuaug.__all__:
        value = getattr(gpuaug, name)
        assert value.__doc__, name
        assert value.__module__.startswith("gpuaug."), name


PACKAGE = Path(gpuaug.__file__).parent
BUILT = ("FeatureStage", "FixedSizeCrop", "PadIfSmaller", "Stage", "StreamedLoader", "TransformStage")
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


@pytest.mark.parametrize("name", DOCUMENTED)
def test_everything_public_says_what_it_is(name):
    assert any(sections(docstring)[""] for docstring in DOCUMENTED[name][1])


@pytest.mark.parametrize("name", CALLED)
def test_every_argument_and_result_is_described(name):
    value, docstrings = DOCUMENTED[name]
    called = inspect.signature(value)
    taken = {argument for argument in called.parameters if argument != "self"}
    described = [sections(docstring) for docstring in docstrings]
    assert taken in [entries(each.get("Args", "")) for each in described]
    if taken and inspect.isfunction(value) and called.return_annotation is not None:
        assert any("Returns" in each or "returns" in entries(each.get("Shape", "")) for each in described)


@pytest.mark.parametrize("name", [name for name in CALLED if name in gpuaug.__all__ and name != "Stage"])
def test_what_is_called_first_says_what_it_costs_and_shows_how(name):
    assert {"Args", "Raises", "Cost", "Examples"} <= sections(DOCUMENTED[name][1][0]).keys()


API_PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


@pytest.mark.parametrize("name", dict.fromkeys([*CALLED, "DecodeStage", "Fused"]))
def test_signatures_show_values_and_not_the_names_of_private_aliases(name):
    """The API page prints annotations as they are written, so an alias in them must have an entry on the page."""
    value = DOCUMENTED[name][0]
    function = inspect.unwrap(value.__init__ if inspect.isclass(value) else value)
    definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    written = [node.annotation for node in ast.walk(definition.args) if isinstance(node, ast.arg) and node.annotation]
    names = [ast.unparse(node) for part in written for node in ast.walk(part) if isinstance(node, ast.Name | ast.Attribute)]
    values = {name: eval(name, function.__globals__) for name in names}
    aliases = {name for name, value in values.items() if get_origin(value) in (Literal, UnionType, Callable)}
    assert {name for name in aliases if f".{name.rpartition('.')[2]}\n" not in API_PAGE} == set()


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
