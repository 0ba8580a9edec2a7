"""Pipelines drawn at random out of all ops that are lowered, and how far their output may be from Kornia's."""

from dataclasses import dataclass, replace
from typing import Any

import kornia.augmentation as K
import torch
from hypothesis import strategies as st
from support.replay import photographs

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])

ROUNDING = 2e-6
"""What an op on single pixels may be off by, in image units."""

INTERPOLATING = 5e-5
"""What an interpolation may be off by at these sizes."""

FRACTION = 1e-3
"""How many values of a batch may lie at a jump once an op before it is not exact."""

MOST = 2e-3
"""What any pipeline may be off by, however its errors might add up."""

FEW = 6
"""As many may in any case: the images are small, and a pixel has three values."""


@dataclass(frozen=True)
class Step:
    """A module to be made, and what it does to an error and to the range of the values."""

    kind: type
    options: dict[str, Any]
    own: float = 0.0
    """What it adds to an error, for values in [0, 1]."""
    gain: float = 1.0
    """The largest ``|d output / d input|``: a bound found by hand, rounded up."""
    reach: float | None = 1.0
    """The largest value that may come out; ``None``: as large as those that went in."""
    jumps: bool = False
    """Whether values a little apart may come out far apart."""
    spreads: bool = False
    """Whether one wrong value may make others wrong."""
    of_exact: bool = False
    """True if the op depends on statistics of a whole channel (histogram, minimum): it is left out behind an inexact op."""
    rgb: bool = False

    def make(self):
        return self.kind(**self.options)

    def __repr__(self):
        return f"K.{self.kind.__name__}({', '.join(f'{key}={value!r}' for key, value in self.options.items())})"


COMMON = {"p": st.sampled_from([0.0, 0.5, 1.0]), "same_on_batch": st.booleans()}
SIDES = st.tuples(st.integers(1, 16), st.integers(1, 16))
FILTERS = st.sampled_from(["bilinear", "nearest"])


def numbers(low, high):
    return st.integers(round(low * 100), round(high * 100)).map(lambda number: number / 100)


def ranges(low, high):
    return st.tuples(numbers(low, high), numbers(low, high)).map(sorted).map(tuple)


def step(kind, fixed=None, common=COMMON, **options):
    """Steps of one kind: ``options`` are strategies, ``fixed`` what :class:`Step` says of them, or a function that does."""

    def made(drawn):
        return Step(kind, drawn, **(fixed(drawn) if callable(fixed) else fixed or {}))

    return st.fixed_dictionaries({**common, **options}).map(made)


MOVES = {"reach": None}


def padded(kind, mode, fill, common, **options):
    """Steps that pad. Kornia takes a fill for the constant mode alone."""
    constant = {mode: st.just("constant"), fill: st.sampled_from([0, 0.5])}
    edges = {mode: st.sampled_from(["reflect", "replicate"])}
    return st.one_of(*(step(kind, MOVES, common, size=SIDES, **options, **padding) for padding in (constant, edges)))


def warped(drawn):
    nearest = drawn.get("resample") == "nearest"
    return {"own": 0.0 if nearest else INTERPOLATING, "reach": None, "jumps": nearest, "spreads": not nearest}


ALWAYS = {"p": st.sampled_from([1.0, 1.0, 1.0, 0.0]), "same_on_batch": st.booleans()}
"""For ops that change the size: by chance they would change it in one set of draws and not in another."""

SURE = {"p": ALWAYS["p"]}

RANDOM_STEPS = {
    K.RandomHorizontalFlip: step(K.RandomHorizontalFlip, MOVES),
    K.RandomVerticalFlip: step(K.RandomVerticalFlip, MOVES),
    K.RandomCrop: padded(
        K.RandomCrop,
        "padding_mode",
        "fill",
        ALWAYS,
        padding=st.none() | st.integers(0, 3) | st.tuples(*[st.integers(0, 3)] * 2) | st.tuples(*[st.integers(0, 3)] * 4),
        pad_if_needed=st.booleans(),
    ),
    K.CenterCrop: step(K.CenterCrop, MOVES, SURE, size=SIDES),
    K.PadTo: padded(K.PadTo, "pad_mode", "pad_value", {}),
    K.RandomResizedCrop: step(
        K.RandomResizedCrop,
        warped,
        ALWAYS,
        size=SIDES,
        scale=ranges(0.1, 1.0),
        ratio=ranges(0.25, 4.0),
        resample=FILTERS,
        align_corners=st.booleans(),
    ),
    K.Resize: step(
        K.Resize,
        warped,
        {},
        size=SIDES | st.integers(1, 16),
        side=st.sampled_from(["short", "long", "vert", "horz"]),
        resample=FILTERS,
        align_corners=st.booleans(),
    ),
    K.RandomRotation: step(
        K.RandomRotation, warped, degrees=ranges(-180.0, 180.0), resample=FILTERS, align_corners=st.booleans()
    ),
    # By a quarter, all pixels of an image of odd and even sides come from between two: the nearest is anyone's guess.
    K.RandomRotation90: step(K.RandomRotation90, warped, times=st.sampled_from([(-3, 3), (1, 1), (0, 2)])),
    K.RandomAffine: step(
        K.RandomAffine,
        warped,
        degrees=ranges(-90.0, 90.0),
        translate=st.none() | st.just((0.2, 0.3)),
        scale=st.none() | ranges(0.5, 1.5) | st.just((0.5, 0.8, 1.1, 1.4)),
        shear=st.none() | ranges(-20.0, 20.0) | st.just((-5.0, 5.0, 10.0, 20.0)),
        resample=FILTERS,
        align_corners=st.booleans(),
        padding_mode=st.sampled_from(["zeros", "border"]),
    ),
    K.RandomShear: step(
        K.RandomShear,
        warped,
        shear=ranges(-30.0, 30.0),
        resample=FILTERS,
        align_corners=st.booleans(),
        padding_mode=st.sampled_from(["zeros", "border"]),
    ),
    K.RandomTranslate: step(
        K.RandomTranslate,
        warped,
        translate_x=st.none() | ranges(-0.5, 0.5),
        translate_y=ranges(-0.5, 0.5),
        resample=FILTERS,
        align_corners=st.booleans(),
        padding_mode=st.sampled_from(["zeros", "border"]),
    ),
    K.RandomPerspective: step(
        K.RandomPerspective,
        warped,
        distortion_scale=numbers(0.0, 0.4),
        sampling_method=st.sampled_from(["basic", "area_preserving"]),
        resample=FILTERS,
        align_corners=st.booleans(),
    ),
    K.RandomBrightness: step(
        K.RandomBrightness,
        lambda drawn: {"own": ROUNDING, "reach": 1.0 if drawn["clip_output"] else None},
        brightness=ranges(0.3, 1.7),
        clip_output=st.booleans(),
    ),
    K.RandomContrast: step(
        K.RandomContrast,
        lambda drawn: {"own": ROUNDING, "gain": 2.0, "reach": 1.0 if drawn["clip_output"] else None},
        contrast=ranges(0.0, 2.0),
        clip_output=st.booleans(),
    ),
    K.RandomSaturation: step(K.RandomSaturation, {"own": ROUNDING, "gain": 6.0, "rgb": True}, saturation=ranges(0.0, 2.0)),
    K.RandomHue: step(K.RandomHue, {"own": ROUNDING, "gain": 4.0, "rgb": True}, hue=ranges(-0.5, 0.5)),
    # Of an exponent below one the slope is without bound where an image is black.
    K.RandomGamma: step(
        K.RandomGamma,
        lambda drawn: {"own": ROUNDING, "gain": 4.0, "jumps": drawn["gamma"][0] < 1},
        gamma=ranges(0.5, 2.5),
        gain=ranges(0.5, 1.5),
    ),
    K.RandomGrayscale: step(
        K.RandomGrayscale,
        {"own": ROUNDING, "reach": None, "rgb": True},
        rgb_weights=st.none() | st.just(torch.tensor([0.5, 0.25, 0.25])),
    ),
    K.RandomInvert: step(K.RandomInvert, {"own": ROUNDING, "reach": None}, max_val=st.sampled_from([1.0, 0.5])),
    K.RandomSolarize: step(
        K.RandomSolarize, {"own": ROUNDING, "jumps": True}, thresholds=ranges(0.0, 1.0), additions=ranges(-0.5, 0.5)
    ),
    K.RandomSnow: step(
        K.RandomSnow,
        {"own": ROUNDING, "gain": 8.0, "jumps": True, "rgb": True},
        snow_coefficient=ranges(0.0, 1.0),
        brightness=ranges(1.0, 3.0),
    ),
    K.RandomPosterize: step(K.RandomPosterize, {"jumps": True}, bits=ranges(0.0, 8.0)),
    K.RandomChannelShuffle: step(K.RandomChannelShuffle, {"reach": None, "rgb": True}),
    K.RandomChannelDropout: step(
        K.RandomChannelDropout, MOVES, num_drop_channels=st.sampled_from([1, 1, 2]), fill_value=st.sampled_from([0.0, 0.5])
    ),
    K.RandomGaussianNoise: step(
        K.RandomGaussianNoise,
        {"own": ROUNDING, "reach": None},
        mean=st.sampled_from([0.0, 0.25]),
        std=st.sampled_from([0.0, 0.3]),
    ),
    K.RandomErasing: step(
        K.RandomErasing, MOVES, scale=ranges(0.02, 1.0), ratio=ranges(0.25, 4.0), value=st.sampled_from([0.0, 0.5])
    ),
    K.Normalize: step(K.Normalize, {"own": 5 * ROUNDING, "gain": 4.5, "reach": None}, {}, mean=st.just(0.5), std=st.just(0.25))
    | step(
        K.Normalize, {"own": 5 * ROUNDING, "gain": 4.5, "reach": None, "rgb": True}, {}, mean=st.just(MEAN), std=st.just(STD)
    ),
    K.Denormalize: step(K.Denormalize, {"own": ROUNDING, "reach": None}, {}, mean=st.just(0.5), std=st.just(0.25))
    | step(K.Denormalize, {"own": ROUNDING, "reach": None, "rgb": True}, {}, mean=st.just(MEAN), std=st.just(STD)),
    **{
        kind: step(
            kind,
            {"own": 3 * ROUNDING, "gain": 20.0, "spreads": kind is K.ColorJitter, "rgb": True},
            brightness=st.sampled_from([0.0, 0.4]),
            contrast=st.sampled_from([0.0, 0.4]),
            saturation=st.sampled_from([0.0, 0.4]),
            hue=st.sampled_from([0.0, 0.1, 0.5]),
            order=st.none() | st.lists(st.integers(0, 3), unique=True, min_size=1),
        )
        for kind in (K.ColorJitter, K.ColorJiggle)
    },
    K.RandomGaussianBlur: step(
        K.RandomGaussianBlur,
        {"own": ROUNDING, "reach": None, "spreads": True},
        kernel_size=st.tuples(*[st.sampled_from([1, 3, 5, 11])] * 2),
        sigma=ranges(0.3, 3.0),
        border_type=st.sampled_from(["constant", "reflect", "replicate", "circular"]),
    ),
    K.RandomEqualize: step(K.RandomEqualize, {"own": ROUNDING, "of_exact": True}),
    K.RandomClahe: step(
        K.RandomClahe,
        {"own": ROUNDING, "of_exact": True, "spreads": True},
        clip_limit=ranges(0.0, 8.0),
        grid_size=st.tuples(*[st.integers(1, 4)] * 2),
    ),
    K.RandomAutoContrast: step(K.RandomAutoContrast, {"own": ROUNDING, "of_exact": True}, clip_output=st.booleans()),
    K.RandomSharpness: step(K.RandomSharpness, {"own": ROUNDING, "gain": 5.0, "spreads": True}, sharpness=ranges(0.0, 3.0)),
    K.RandomMixUpV2: step(K.RandomMixUpV2, {"own": ROUNDING, "reach": None, "spreads": True}, lambda_val=ranges(0.0, 1.0)),
    K.RandomCutMixV2: step(K.RandomCutMixV2, MOVES, use_correct_lambda=st.just(True), cut_size=st.none() | ranges(0.0, 0.9)),
}

MIXES = (K.RandomMixUpV2, K.RandomCutMixV2)
"""Kornia's containers take one of them."""


@dataclass(frozen=True)
class Case:
    steps: tuple[Step, ...]
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    layout: str
    out: torch.memory_format
    seed: int
    random_apply: bool = False

    def images(self):
        made = photographs(*self.shape, dtype=self.dtype, seed=self.seed)
        if self.layout == "channels last":
            return made.to(memory_format=torch.channels_last)
        if self.layout == "strided":
            return made.repeat_interleave(2, 3)[..., ::2]
        return made.mT.contiguous().mT if self.layout == "transposed" else made

    def tolerance(self):
        """(how far values may be apart, whether some may be further).

        An error grows with each op. Behind one that jumps, a few values may be anything, so what would spread them is left out
        of a pipeline (:func:`cases`).
        """
        error, reach, jumped = 0.0, 1.0, False
        for each in self.steps:
            jumped |= each.jumps and (error > 0 or each.kind not in (K.RandomPosterize, K.RandomSolarize))
            error = error * each.gain + each.own * max(reach, 1.0)
            reach = each.reach or reach * max(each.gain, 1.0) + 1
        return min(error, MOST), jumped


INTERPOLATION = Step(K.RandomRotation, {"degrees": 30.0, "p": 1.0}, INTERPOLATING, reach=None)


@st.composite
def cases_of(draw, kind):
    """One op, applied to all samples: alone, and, unless it needs exact input, behind an interpolation."""
    drawn = draw(RANDOM_STEPS[kind])
    step = replace(drawn, options={key: 1.0 if key == "p" else value for key, value in drawn.options.items()})
    pipelines = [(step,)] if step.of_exact else [(step,), (INTERPOLATION, step)]
    seed = draw(st.integers(0, 2**32))
    return [Case(steps, (4, 3, 17, 22), torch.uint8, "plain", torch.contiguous_format, seed) for steps in pipelines]


@st.composite
def cases(draw):
    channels = draw(st.sampled_from([3, 3, 3, 1]))
    steps, inexact, jumped = [], False, False
    for kind in draw(st.lists(st.sampled_from(list(RANDOM_STEPS)), min_size=1, max_size=6)):
        each = draw(RANDOM_STEPS[kind])
        mixed = any(one.kind in MIXES for one in steps)
        if (
            (each.rgb and channels != 3)
            or (each.spreads and jumped)
            or (each.of_exact and inexact)
            or (each.kind in MIXES and mixed)
        ):
            continue
        jumped |= each.jumps and (inexact or each.kind not in (K.RandomPosterize, K.RandomSolarize))
        inexact |= each.own > 0
        steps.append(each)
    return Case(
        tuple(steps) or (Step(K.RandomHorizontalFlip, {}),),
        (draw(st.integers(0, 4)), channels, draw(st.integers(1, 24)), draw(st.integers(1, 24))),
        draw(st.sampled_from([torch.uint8, torch.float32])),
        draw(st.sampled_from(["plain", "channels last", "strided", "transposed"])),
        draw(st.sampled_from([torch.contiguous_format, torch.channels_last])),
        draw(st.integers(0, 2**32)),
        # A mix has its own rules there, and is left to Kornia.
        draw(st.sampled_from([False, False, True])) and not any(each.kind in MIXES for each in steps),
    )
