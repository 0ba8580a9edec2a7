"""Every public parameter with a valid call of it, and values of every kind to give it instead."""

import math
import tempfile
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kornia.augmentation as K
import numpy as np
import torch
from support.files.encoded import encoded
from support.loader.checkpoints import Counter
from support.processors.stand_ins import read_stand_in
from support.profiler.profiler_reports import load, report
from torch import nn

import gpuaug
from gpuaug import DecodeStage, FeatureStage, Stage, StreamedLoader, Timeline, TransformStage

IMAGES = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
FLIP = K.RandomHorizontalFlip()
AUGMENT = gpuaug.fuse(FLIP)
DRAWS = AUGMENT.draw(IMAGES.shape, seed=0)
RAGGED = gpuaug.collate_ragged(list(IMAGES))
ENCODED = gpuaug.collate_encoded([encoded()])
ENCODER = nn.Flatten()
PROCESSOR = gpuaug.FusedProcessor(read_stand_in("ViTImageProcessor"), torch.float32)
STATE = {"version": 2, "seed": 1, "epoch": 1, "batch": 1, "ended": False, "chosen": False, "source": {"next": 1}, "ranks": 1}
STATE["stages"] = {}
TARGETS = [{"boxes": torch.zeros(1, 4), "valid": torch.tensor([True])}]

VALUES: dict[str, Any] = {
    "None": None,
    "True": True,
    "NumPy's True": np.True_,
    "0": 0,
    "1": 1,
    "-1": -1,
    "2**64": 2**64,
    "10**30": 10**30,
    "1.0": 1.0,
    "1.5": 1.5,
    "NaN": math.nan,
    "infinity": math.inf,
    "a complex number": 1j,
    "an empty str": "",
    "a str": "x",
    "a long str": "x" * 5000,
    "bytes": b"x",
    "an empty list": [],
    "a list": ["a"],
    "a list of None": [None],
    "an empty tuple": (),
    "a tuple": ("a",),
    "a tuple with a list": (["a"],),
    "an empty dict": {},
    "a dict": {"a": 1},
    "a set": {"a"},
    "an object": object(),
    "a class": int,
    "a function": lambda *_, **__: None,
    "a module": nn.Identity(),
    "a dtype": torch.int64,
    "a memory format": torch.preserve_format,
    "a slice": slice(0, 1),
    "a tensor of one": torch.tensor(1),
    "a tensor of a bool": torch.tensor(True),
    "images": IMAGES,
    "an array": np.zeros((64, 64)),
    "draws in Kornia's form": [DRAWS.as_kornia()],
    "a path": Path("x"),
}

LEFT_OUT = {"None"}
FLAG = {"True", "NumPy's True"}
FROM_0 = {"0", "1", "a tensor of one"}
FROM_1 = {"1", "a tensor of one"}
SHARE = {"0", "1", "1.0"}
NUMBERS = FROM_0 | {"-1", "1.0", "1.5"}
LARGE = {"2**64", "10**30"}
STR = {"a str", "a long str"}
CALLABLE = {"a function", "a module"}
EMPTY = {"an empty list", "an empty tuple"}
ITERABLE = EMPTY | {
    "a list",
    "a list of None",
    "a tuple",
    "a tuple with a list",
    "a set",
    "images",
    "an array",
    "draws in Kornia's form",
}
KEY = VALUES.keys() - {
    *("an empty list", "a list", "a list of None", "an empty tuple", "a tuple with a list", "an empty dict", "a dict", "a set"),
    *("a slice", "a tensor of one", "a tensor of a bool", "images", "an array", "draws in Kornia's form"),
}
"""Whatever may be a key of a batch, and a tuple of one."""


FILL = {
    "fits": FROM_0 - {"a tensor of one"} | {"-1", "1.0", "1.5", "NaN", "infinity", "an empty dict", "a dict"} | LARGE,
    "wrong": ((1, "a"), {"a": None}),
}
"""Numbers, and dicts of them, as the value of a padding."""


class Reached(Exception):
    """A call is past its checks; what it would do next takes long."""


@dataclass(frozen=True)
class Parameter:
    """How a public parameter is given a value."""

    call: Callable[[Any], Any]
    """Calls with that value, and with valid ones for all others."""
    valid: Any
    """A value that works."""
    fits: Set[str] = frozenset()
    """Names of those of ``VALUES`` that work too."""
    called: str = ""
    """What errors call the parameter, where that is not its name."""
    wrong: tuple[Any, ...] = ()
    """More values that do not work."""
    foreign: tuple[type[Exception], ...] = ()
    """Errors besides those of gpuaug that are part of the interface."""


def reached(*_):
    raise Reached


def loader(source=(IMAGES,), stages=(), **options):
    return StreamedLoader(source, stages, device=options.pop("device", "cpu"), **options)


def assigned(name):
    return lambda value: setattr(loader(), name, value)


class Plain(Stage):
    kind = "plain"

    def bind(self, name, lanes):
        raise AssertionError("no loader has it")


def fused(**options):
    return gpuaug.fuse(FLIP, **{"num_classes": 3, **options})


def saved(path, **options):
    with tempfile.TemporaryDirectory() as folder:
        Timeline((), "cpu", 2).save(Path(folder, path) if isinstance(path, str) and path == "timeline.svg" else path, **options)


DEPTH = {"fits": FROM_0 | LARGE}
STAGES = {"fits": EMPTY, "called": "stages|transform", "wrong": ([AUGMENT, 5], [K.RandomInvert])}
SHAPE = {"wrong": ((1, 3, 8), (1, 3, 8, -1), (1, 3, 8, "x"), (1, 3, 8, 1.5), (True, 3, 8, 8), (2**63, 3, 8, 8), "abcd")}
DEVICE = {
    "fits": LEFT_OUT | {str(index) for index in range(torch.cuda.device_count())} & {"0", "1"},
    "wrong": ("gpu0", 1000, torch.float32),
}
SELECTED = {"wrong": ((0, 0), (torch.tensor(0),), torch.tensor(0))}
CHANNELS = {"fits": {"1"}, "wrong": (2, "3")}

PARAMETERS = {
    "DecodeStage(on)": Parameter(lambda v: DecodeStage(on=v), 0, KEY, **SELECTED),
    "DecodeStage(backend)": Parameter(lambda v: DecodeStage(backend=v), "cpu"),
    "DecodeStage(channels)": Parameter(lambda v: DecodeStage(channels=v), 1, {"1"} | LEFT_OUT, wrong=CHANNELS["wrong"]),
    "DecodeStage(threads)": Parameter(lambda v: DecodeStage(threads=v), 2, LEFT_OUT | FROM_1),
    "DecodeStage(min_side)": Parameter(lambda v: DecodeStage(min_side=v), 64, LEFT_OUT | FROM_1 | LARGE),
    "DecodeStage(scale)": Parameter(lambda v: DecodeStage(scale=v), "auto", LEFT_OUT),
    "DecodeStage(exif)": Parameter(lambda v: DecodeStage(exif=v), False, FLAG),
    "DecodeStage(on_error)": Parameter(lambda v: DecodeStage(on_error=v), "replace"),
    "DecodeStage(max_replaced)": Parameter(
        lambda v: DecodeStage(on_error="replace", max_replaced=v), 0.05, FROM_0 | {"1.0"}, wrong=(-0.01, 1.01, "0.5")
    ),
    "DecodeStage(max_pixels)": Parameter(lambda v: DecodeStage(max_pixels=v), 100, FROM_1 | LARGE),
    "DecodeStage(max_bytes)": Parameter(lambda v: DecodeStage(max_bytes=v), 100, FROM_1 | LARGE),
    "DecodeStage(name)": Parameter(lambda v: DecodeStage(name=v), "jpeg", LEFT_OUT | STR),
    "DecodeStage.__call__(encoded)": Parameter(lambda v: DecodeStage()(v, "cpu"), ENCODED, wrong=((ENCODED, 1), RAGGED)),
    "DecodeStage.__call__(device)": Parameter(lambda v: DecodeStage()(ENCODED, v), "cpu", **DEVICE),
    "Draws.of(sample)": Parameter(DRAWS.of, 1, FROM_0, wrong=(2,)),
    "Encoded.file(index)": Parameter(ENCODED.file, 0, {"0"}, wrong=(1,)),
    "FeatureStage(encoder)": Parameter(FeatureStage, {"a": ENCODER}, {"a module"}, wrong=(nn.Linear(2, 2), nn.Linear)),
    "FeatureStage(on)": Parameter(lambda v: FeatureStage(ENCODER, on=v), 0, KEY, **SELECTED),
    "FeatureStage(into)": Parameter(lambda v: FeatureStage(ENCODER, into=v), 1, KEY - LEFT_OUT, **SELECTED),
    "FeatureStage(autocast)": Parameter(lambda v: FeatureStage(ENCODER, autocast=v), torch.bfloat16, LEFT_OUT),
    "FeatureStage(memory_format)": Parameter(lambda v: FeatureStage(ENCODER, memory_format=v), torch.channels_last, LEFT_OUT),
    "FeatureStage(capture)": Parameter(lambda v: FeatureStage(ENCODER, capture=v), "never"),
    "FeatureStage(output)": Parameter(
        lambda v: FeatureStage(ENCODER, output=v), 0, LEFT_OUT | STR | LARGE | {"0", "1", "-1", "an empty str", "a function"}
    ),
    "FeatureStage(cache)": Parameter(lambda v: FeatureStage(ENCODER, cache=v), gpuaug.FeatureCache("cache"), LEFT_OUT),
    "CopyPaste(p)": Parameter(gpuaug.CopyPaste, 0.5, SHARE),
    "FeatureCache(folder)": Parameter(gpuaug.FeatureCache, "cache", STR | {"an empty str", "a path"}),
    "FeatureCache(views)": Parameter(lambda v: gpuaug.FeatureCache("cache", views=v), 2, FROM_1),
    "FeatureCache.wrap(dataset)": Parameter(
        gpuaug.FeatureCache("cache").wrap,
        ["a.jpg"],
        (ITERABLE - {"images", "an array"}) | {"a dict", "an empty dict"},
    ),
    "FeatureCache.wrap(key)": Parameter(
        lambda v: gpuaug.FeatureCache("cache").wrap(["a.jpg"], key=v),
        "id",
        LEFT_OUT | STR | LARGE | {"an empty str", "0", "1", "-1"},
    ),
    "FeatureStage(graph_bytes)": Parameter(lambda v: FeatureStage(ENCODER, graph_bytes=v), 1 << 30, LEFT_OUT | FROM_0 | LARGE),
    "FeatureStage.capture(shapes)": Parameter(
        FeatureStage(ENCODER).capture,
        [(2, 2)],
        EMPTY,
        wrong=([(2, "x")], (2, 2), [2.5], [()], [(2, -1)], [{2: 3}], [(IMAGES, 3)]),
    ),
    "FeatureStage(name)": Parameter(lambda v: FeatureStage(ENCODER, name=v), "encoder", LEFT_OUT | STR),
    "FixedSizeCrop(size)": Parameter(gpuaug.FixedSizeCrop, (8, 6), FROM_1 | LARGE, wrong=((1, 2, 3), (8, 0))),
    "FixedSizeCrop(fill)": Parameter(lambda v: gpuaug.FixedSizeCrop(8, v), (1.0, 2.0, 3.0), **FILL),
    "Fused.draw(shape)": Parameter(AUGMENT.draw, IMAGES.shape, **SHAPE),
    "Fused.draw(seed)": Parameter(lambda v: AUGMENT.draw(IMAGES.shape, v), 5, LEFT_OUT | FROM_0),
    "Fused.draw(dtype)": Parameter(
        lambda v: AUGMENT.draw(IMAGES.shape, dtype=v), torch.float64, LEFT_OUT, wrong=(torch.int64, "float32")
    ),
    "Fused.explain(dtype)": Parameter(
        lambda v: AUGMENT.explain(dtype=v), torch.float64, LEFT_OUT, wrong=(torch.int64, "float32")
    ),
    "Fused.explain(shape)": Parameter(AUGMENT.explain, (2, 3, 8, 8), LEFT_OUT, **SHAPE),
    "FusedProcessor.forward(images)": Parameter(PROCESSOR, RAGGED, wrong=(ENCODED,)),
    "FusedProcessor.grids(images)": Parameter(PROCESSOR.grids, ENCODED, wrong=([ENCODED],)),
    "Fused.forward(inputs)": Parameter(AUGMENT, IMAGES, {"images"}, "inputs?|images", wrong=(ENCODED, RAGGED, IMAGES.long())),
    "Fused.forward(data_keys)": Parameter(
        lambda v: AUGMENT(IMAGES, data_keys=v), ["input"], LEFT_OUT, wrong=("input", [["input"]])
    ),
    "Fused.forward(draws)": Parameter(lambda v: AUGMENT(IMAGES, draws=v), DRAWS, LEFT_OUT),
    "MixUpBoxes(p)": Parameter(gpuaug.MixUpBoxes, 0.5, SHARE),
    "MixUpBoxes(alpha)": Parameter(lambda v: gpuaug.MixUpBoxes(alpha=v), 32, {"1", "1.0", "1.5"}),
    "MixUpBoxes(fill)": Parameter(lambda v: gpuaug.MixUpBoxes(fill=v), 114, SHARE | {"1.5"}, wrong=(256,)),
    "Mosaic(size)": Parameter(gpuaug.Mosaic, 640, wrong=(2**15 + 1,)),
    "Mosaic(fill)": Parameter(lambda v: gpuaug.Mosaic(8, v), 114, SHARE | {"1.5"}, wrong=(256,)),
    "Mosaic(p)": Parameter(lambda v: gpuaug.Mosaic(8, p=v), 0.5, SHARE),
    "PadIfSmaller(size)": Parameter(gpuaug.PadIfSmaller, 8, FROM_1 | LARGE),
    "PadIfSmaller(fill)": Parameter(lambda v: gpuaug.PadIfSmaller(8, v), {"others": 3}, **FILL),
    "Ragged.__getitem__(index)": Parameter(lambda v: RAGGED[v], -2, {"0", "1", "-1", "a tensor of one"}, foreign=(IndexError,)),
    "Ragged.to(device)": Parameter(RAGGED.to, "cpu", **DEVICE),
    "Ragged.to(non_blocking)": Parameter(lambda v: RAGGED.to("cpu", non_blocking=v), False, FLAG),
    "Report.part(name)": Parameter(report(load()).part, "load"),
    "Stage(on)": Parameter(lambda v: Plain(on=v, into=..., name=None), 0, KEY, **SELECTED),
    "Stage(into)": Parameter(lambda v: Plain(on=0, into=v, name=None), 1, KEY - LEFT_OUT, **SELECTED),
    "Stage(name)": Parameter(lambda v: Plain(on=0, into=..., name=v), "stage", LEFT_OUT | STR),
    "StreamedLoader(loader)": Parameter(loader, [IMAGES], ITERABLE),
    "StreamedLoader(stages)": Parameter(lambda v: loader(stages=v), [AUGMENT], **STAGES),
    "StreamedLoader(device)": Parameter(lambda v: loader(device=v), "cpu", **DEVICE),
    "StreamedLoader(depth)": Parameter(lambda v: loader(depth=v), 3, **DEPTH),
    "StreamedLoader(seed)": Parameter(lambda v: loader(seed=v), 2**64 - 1, LEFT_OUT | FROM_0),
    "StreamedLoader(rank)": Parameter(lambda v: loader(rank=v), 2**63 - 1, LEFT_OUT | FROM_0, wrong=(2**63,)),
    "StreamedLoader(feed)": Parameter(lambda v: loader(feed=v), "plain"),
    "StreamedLoader(feed_bytes)": Parameter(lambda v: loader(feed_bytes=v), 10**6, LEFT_OUT | FROM_0),
    "StreamedLoader.depth": Parameter(assigned("depth"), 3, **DEPTH),
    "StreamedLoader.seed": Parameter(assigned("seed"), 3, FROM_0),
    "StreamedLoader.stages": Parameter(assigned("stages"), [AUGMENT], **STAGES),
    "StreamedLoader.set_epoch(epoch)": Parameter(loader().set_epoch, 2**63 - 1, FROM_0, wrong=(2**63,)),
    "StreamedLoader.skip(batches)": Parameter(loader().skip, 3, FROM_0, wrong=(2**63,)),
    "StreamedLoader.load_state_dict(state_dict)": Parameter(
        loader(Counter()).load_state_dict, STATE, wrong=({**STATE, "seed": -1}, {**STATE, "ended": 1})
    ),
    "StreamedLoader.load_state_dict(strict)": Parameter(
        lambda v: loader(Counter()).load_state_dict(STATE, strict=v), True, FLAG
    ),
    "Timeline.figure(width_in)": Parameter(Timeline((), "cpu", 2).figure, 8, wrong=(5.9, 401, "12")),
    "Timeline.save(path)": Parameter(saved, "timeline.svg", wrong=("x.bmp", "x", "x.json.gz")),
    "Timeline.save(width_in)": Parameter(lambda v: saved("timeline.svg", width_in=v), 8.5),
    "TransformStage(transform)": Parameter(TransformStage, AUGMENT, CALLABLE, wrong=(nn.Identity,)),
    "TransformStage(on)": Parameter(lambda v: TransformStage(AUGMENT, on=v), {0: "input"}, KEY, **SELECTED),
    "TransformStage(into)": Parameter(lambda v: TransformStage(AUGMENT, into=v), "new", KEY - LEFT_OUT, **SELECTED),
    "TransformStage(name)": Parameter(lambda v: TransformStage(AUGMENT, name=v), "augment", LEFT_OUT | STR),
    "collate_encoded(samples)": Parameter(
        gpuaug.collate_encoded, [encoded()], {"a list", "a tuple"}, "samples?|images", wrong=([5], [(encoded(), 1), 2])
    ),
    "collate_encoded(flatten)": Parameter(
        lambda v: gpuaug.collate_encoded([{"images": [encoded()], "one": encoded()}], flatten=v), "images", LEFT_OUT
    ),
    "collate_ragged(samples)": Parameter(gpuaug.collate_ragged, list(IMAGES), called="samples?", wrong=([5], [IMAGES[0], 2])),
    "collate_ragged(convert)": Parameter(lambda v: gpuaug.collate_ragged(list(IMAGES), convert=v), False, FLAG),
    "collate_ragged(channels)": Parameter(
        lambda v: gpuaug.collate_ragged(list(IMAGES), convert=True, channels=v), 3, **CHANNELS
    ),
    "fuse(pipeline)": Parameter(gpuaug.fuse, [FLIP], {"a module"}, wrong=(K.RandomInvert, [FLIP, 5], [K.RandomInvert])),
    "fuse(dtype)": Parameter(lambda v: fused(dtype=v), torch.float16, LEFT_OUT, wrong=(torch.float64, "float32")),
    "fuse(memory_format)": Parameter(lambda v: fused(memory_format=v), torch.channels_last),
    "fuse(pick)": Parameter(lambda v: fused(pick=v), "sample"),
    "fuse(ragged)": Parameter(lambda v: gpuaug.fuse(K.RandomResizedCrop((8, 8)), ragged=v), False, FLAG),
    "fuse(antialias)": Parameter(lambda v: fused(antialias=v), False, FLAG),
    "fuse(views)": Parameter(lambda v: fused(views=v), 2, FROM_1, wrong=(2**31,)),
    "fuse(boxes)": Parameter(lambda v: fused(boxes=v), "xywh"),
    "fuse(num_classes)": Parameter(lambda v: fused(num_classes=v), 2**31 - 1, LEFT_OUT | FROM_1, wrong=(2**31,)),
    "fuse(label_smoothing)": Parameter(lambda v: fused(label_smoothing=v), 0.1, {"0"}),
    "profile(loader)": Parameter(lambda v: gpuaug.profile(v, reached), loader()),
    "profile(step)": Parameter(
        lambda v: gpuaug.profile(loader(), v, batches=8, rounds=1, show=False), reached, CALLABLE, foreign=(ValueError,)
    ),
    "profile(batches)": Parameter(lambda v: gpuaug.profile(loader(), reached, batches=v), 8, LARGE),
    "profile(rounds)": Parameter(lambda v: gpuaug.profile(loader(), reached, rounds=v), 1, FROM_1 | LARGE),
    "profile(show)": Parameter(lambda v: gpuaug.profile(loader(), reached, show=v), False, FLAG),
    "read_clip(source)": Parameter(gpuaug.read_clip, "a.mp4", STR | {"an empty str", "bytes", "a path"}),
    "read_clip(frames)": Parameter(lambda v: gpuaug.read_clip("a", v), [0, 4], FROM_1, "frames|frame", wrong=([0, -1], [0.5])),
    "read_clip(stride)": Parameter(lambda v: gpuaug.read_clip("a", stride=v), 4, FROM_1),
    "read_clip(start)": Parameter(lambda v: gpuaug.read_clip("a", start=v), 4, FROM_0 | LEFT_OUT),
    "read_clip(start_s)": Parameter(lambda v: gpuaug.read_clip("a", start_s=v), 0.5, NUMBERS | LARGE | LEFT_OUT),
    "read_clip(at)": Parameter(lambda v: gpuaug.read_clip("a", at=v), 0.5, FROM_0 | {"1.0"} | LEFT_OUT, wrong=(-0.1, 1.1)),
    "read_clip(times_s)": Parameter(
        lambda v: gpuaug.read_clip("a", times_s=v), [0.5], LEFT_OUT, "times_s|time", wrong=([0, None],)
    ),
    "read_clip(short)": Parameter(lambda v: gpuaug.read_clip("a", short=v), "loop"),
    "read_encoded(path)": Parameter(gpuaug.read_encoded, "a.jpg", STR | {"an empty str", "a path"}),
    "sanitize(targets)": Parameter(
        gpuaug.sanitize,
        TARGETS,
        EMPTY | {"draws in Kornia's form"},
        "targets|valid",
        wrong=([{"valid": 1}], {"valid": IMAGES}, [5]),
    ),
    "sanitize(per_box)": Parameter(
        lambda v: gpuaug.sanitize(TARGETS, per_box=v), ("boxes",), {"a list", "a tuple", "a set"} | EMPTY | LEFT_OUT
    ),
    "schedule(make)": Parameter(
        lambda v: gpuaug.schedule(v, {0: AUGMENT}), TransformStage, {"a module"}, "make|transform", foreign=(TypeError,)
    ),
    "schedule(values)": Parameter(
        lambda v: gpuaug.schedule(lambda _: AUGMENT, v), {0: 1, 5: 2}, wrong=({1: 1}, {0: [1]}, {0: 1, -1: 2}, {0: 1, 2.0: 2})
    ),
    "show(loader)": Parameter(lambda v: gpuaug.show(v), loader([IMAGES.float()], [AUGMENT])),
    "show(n)": Parameter(lambda v: gpuaug.show(loader([IMAGES.float()], [AUGMENT]), v), 2, FROM_1 | LARGE),
    "step_first(device)": Parameter(lambda v: gpuaug.step_first(v)(int)(), "cpu", **DEVICE),
    "until(epoch)": Parameter(lambda v: gpuaug.until(v, AUGMENT, AUGMENT), 3, FROM_0 | LARGE),
    "until(first)": Parameter(lambda v: gpuaug.until(3, v, AUGMENT), AUGMENT, CALLABLE, "transform", wrong=(K.RandomInvert,)),
    "until(then)": Parameter(lambda v: gpuaug.until(3, AUGMENT, v), AUGMENT, CALLABLE, "transform", wrong=(K.RandomInvert,)),
}
