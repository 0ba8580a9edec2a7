"""What a user may rely on. A change of this table is a change of the interface: it belongs into the changelog."""

import inspect
import re
from importlib import metadata

import gpuaug

PUBLIC = {
    "ArgumentError": "GpuAugError, ValueError",
    "ArgumentTypeError": "GpuAugError, TypeError",
    "DeviceError": "GpuAugError, RuntimeError",
    "Draws": "(shape, _tree, _drawn, _sizes, _more=())",
    "Draws.alone": "(self, index)",
    "Draws.as_kornia": "(self)",
    "Draws.of": "(self, sample)",
    "Draws.views": "property",
    "Explanation": "(lines, shape, executor='', notes=())",
    "Explanation.launches": "property",
    "FeatureStage": "(encoder, *, on=…, into=…, autocast=None, memory_format=None, capture='auto', name=None)",
    "FeatureStage.bind": "(self, name, lanes)",
    "FeatureStage.branches": "property",
    "FeatureStage.update": "(self)",
    "Fused": "(pipeline, options)",
    "Fused.draw": "(self, shape, seed=None)",
    "Fused.explain": "(self, shape=None)",
    "Fused.extra_repr": "(self)",
    "Fused.forward": "(self, *inputs, data_keys=None, draws=None)",
    "GpuAugError": "Exception",
    "GpuAugWarning": "UserWarning",
    "IteratorEndedError": "GpuAugError, RuntimeError",
    "Part": "(name, wall, host=None, device_ms=None, launches=None, waits_at=None, kind='', runs='')",
    "Ragged": "(data, places, shapes)",
    "Ragged.device": "property",
    "Ragged.pin_memory": "(self, *args)",
    "Ragged.to": "(self, device, *, non_blocking=False)",
    "Report": (
        "(parts, in_line, streamed, cached, thread_ms, batch_bytes, pageable_bytes, link_gb_per_s, lanes, settings, "
        "timeline, epoch_ms=0.0, verdict=())"
    ),
    "Report.bound_ms": "property",
    "Report.copy_gb_per_s": "property",
    "Report.copy_ms": "property",
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
        "held_back=0, held_back_ms=0.0)"
    ),
    "StreamedLoader": "(loader, stages=(), *, device=None, depth=2, seed=None, rank=None, feed='auto', feed_bytes=None)",
    "StreamedLoader.batch_sampler": "property",
    "StreamedLoader.batch_size": "property",
    "StreamedLoader.close": "(self)",
    "StreamedLoader.dataset": "property",
    "StreamedLoader.depth": "property",
    "StreamedLoader.device": "property",
    "StreamedLoader.drop_last": "property",
    "StreamedLoader.sampler": "property",
    "StreamedLoader.seed": "property",
    "StreamedLoader.set_epoch": "(self, epoch)",
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
    "collate_ragged": "(samples, *, convert=False, channels=3)",
    "fuse": (
        "(pipeline, *, dtype=torch.float32, memory_format=torch.contiguous_format, pick='batch', ragged=False, "
        "antialias=False, views=1, boxes='xyxy', num_classes=None, label_smoothing=0.0)"
    ),
    "profile": "(loader, step, *, batches=40, rounds=3, show=True)",
    "sanitize": "(targets)",
    "show": "(loader, n=8)",
}


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


def test_public_names_are_listed_in_order_and_once():
    assert sorted(gpuaug.__all__) == gpuaug.__all__
    assert len(set(gpuaug.__all__)) == len(gpuaug.__all__)


def test_every_public_name_says_where_it_is_from_and_what_it_is():
    for name in gpuaug.__all__:
        value = getattr(gpuaug, name)
        assert value.__doc__, name
        assert value.__module__.startswith("gpuaug."), name


def test_the_version_is_that_of_the_package():
    assert gpuaug.__version__ == metadata.version("gpuaug")
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", gpuaug.__version__)
