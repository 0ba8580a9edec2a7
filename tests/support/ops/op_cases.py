"""What the tests know of each lowered class of Kornia's: one ``Case`` per class feeds the tables of the tests of ops."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import kornia.augmentation as K
import torch
from hypothesis import strategies as st
from support.ops.random_steps import (
    ALWAYS,
    FILTERS,
    MOVES,
    ROUNDING,
    SIDES,
    SURE,
    either,
    numbers,
    padded,
    ranges,
    steps,
    warped,
)

from gpuaug.fusion.lower.kornia import LOWERED
from gpuaug.fusion.ops.base import ChannelOp, PointOp
from gpuaug.fusion.ops.filters import BlurOp, SharpnessOp
from gpuaug.fusion.ops.geometry import GatherOp

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
WEIGHTS = torch.tensor([0.5, 0.25, 0.25])

Settings = dict[str, dict[str, Any]]
"""Arguments of the constructor without ``p``, by the name of the tests that use them."""


@dataclass(frozen=True, eq=False)
class Case:
    """What the tests need to know of one class."""

    kind: type
    parameters: str
    """Parameters of its constructor, in order: those that were compared with the op."""

    settings: Settings
    """Settings whose draws are compared with Kornia's, and whose pixels are if the op is pointwise.

    The first settings also serve the tests that take one module per class: of skipped samples, compilation, ``alone``.
    """

    steps: Callable[[type], st.SearchStrategy]
    """Its part in random pipelines, made by ``random_steps.steps``."""

    more_pixels: Settings = field(default_factory=dict)
    """Settings whose pixels alone are compared."""

    more_draws: Settings = field(default_factory=dict)
    """Settings whose draws alone are compared."""

    drawn: bool = True
    """Whether the draws are compared number by number. False if it draws the apply mask alone, or has a test of its own."""

    exact: bool = False
    """Whether Kornia, the torch executor and the kernels give the same bits."""

    jumps: bool = False
    """Whether 0.1 % of the pixels may be off, at a threshold. Leave it out unless a test fails without it."""

    atol: float = ROUNDING
    """What pixels may differ from Kornia's by, for values in [0, 1]."""

    alone: bool = True
    """Whether the kernels are compared with torch on the op alone. False if a pipeline of ``pipelines.py`` has it."""

    @property
    def pointwise(self):
        return issubclass(LOWERED[self.kind], PointOp)

    @property
    def moves(self):
        """Whether it moves pixels or looks at their neighbours."""
        return issubclass(LOWERED[self.kind], GatherOp | BlurOp | SharpnessOp)

    @property
    def rgb(self):
        """Whether it takes images of three channels only."""
        kind = LOWERED[self.kind]
        return getattr(kind, "rgb_only", False) and not issubclass(kind, ChannelOp)

    @property
    def name(self):
        """Name of the first settings."""
        return next(iter(self.settings))

    @property
    def first_settings(self):
        return self.settings[self.name]

    def first(self, **options):
        """The module under the first settings."""
        return self.kind(**{**self.first_settings, **options})


PADDING = st.none() | st.integers(0, 3) | st.tuples(*[st.integers(0, 3)] * 2) | st.tuples(*[st.integers(0, 3)] * 4)
SAMPLED = {"resample": FILTERS, "align_corners": st.booleans()}
WARPED = {**SAMPLED, "padding_mode": st.sampled_from(["zeros", "border"])}

FLIP = "p p_batch same_on_batch keepdim"

GEOMETRY = [
    Case(K.RandomHorizontalFlip, FLIP, {"horizontal flip": {}}, steps(MOVES), exact=True, alone=False),
    Case(K.RandomVerticalFlip, FLIP, {"vertical flip": {}}, steps(MOVES), exact=True, alone=False),
    Case(
        K.RandomCrop,
        "size padding pad_if_needed fill padding_mode resample same_on_batch align_corners p keepdim cropping_mode",
        {
            "crop": {"size": (12, 40)},
            "crop, padded": {"size": (24, 40), "padding": (3, 5, 2, 7)},
            "crop, padded if needed": {"size": (24, 40), "padding": 1, "pad_if_needed": True, "padding_mode": "reflect"},
        },
        padded("padding_mode", "fill", ALWAYS, padding=PADDING, pad_if_needed=st.booleans()),
        exact=True,
        alone=False,
    ),
    Case(
        K.CenterCrop,
        "size align_corners resample p keepdim cropping_mode",
        {"middle": {"size": (14, 16)}},
        steps(MOVES, SURE, size=SIDES),
        drawn=False,
        exact=True,
    ),
    Case(
        K.PadTo,
        "size pad_mode pad_value keepdim crop_if_exceeds",
        {"pad": {"size": (20, 36)}},
        padded("pad_mode", "pad_value", {}),
        drawn=False,
        exact=True,
        alone=False,
    ),
    Case(
        K.RandomResizedCrop,
        "size scale ratio resample same_on_batch align_corners p keepdim cropping_mode",
        {
            "resized crop": {"size": (24, 40)},
            "resized crop, misses": {"size": (24, 40), "scale": (0.6, 1.0), "ratio": (0.5, 3.0)},
            "resized crop, narrow": {"size": (24, 40), "scale": (0.5, 1.0), "ratio": (0.4, 0.9)},
            "resized crop, wide": {"size": (24, 40), "scale": (0.7, 1.0), "ratio": (2.0, 5.0)},
        },
        steps(warped, ALWAYS, size=SIDES, scale=ranges(0.1, 1.0), ratio=ranges(0.25, 4.0), **SAMPLED),
        alone=False,
    ),
    Case(
        K.Resize,
        "size side resample align_corners antialias p keepdim",
        {"resize": {"size": (12, 30)}},
        steps(warped, {}, size=SIDES | st.integers(1, 16), side=st.sampled_from(["short", "long", "vert", "horz"]), **SAMPLED),
        drawn=False,
        alone=False,
    ),
    Case(
        K.RandomRotation,
        "degrees resample same_on_batch align_corners p keepdim",
        {"rotation": {"degrees": 45.0}, "rotation, one way": {"degrees": (10.0, 80.0)}},
        steps(warped, degrees=ranges(-180.0, 180.0), **SAMPLED),
    ),
    Case(
        K.RandomRotation90,
        "times resample same_on_batch align_corners p keepdim",
        {"quarters": {"times": (-3, 3)}},
        # By a quarter, all pixels of an image of odd and even sides come from between two: the nearest is anyone's guess.
        steps(warped, times=st.sampled_from([(-3, 3), (1, 1), (0, 2)])),
        alone=False,
    ),
    Case(
        K.RandomAffine,
        "degrees translate scale shear resample same_on_batch align_corners padding_mode fill_value p keepdim",
        {
            "affine": {"degrees": 30.0, "translate": (0.2, 0.1), "scale": (0.7, 1.3), "shear": (5.0, 20.0, -8.0, 3.0)},
            "affine, two scales": {"degrees": (-10.0, 40.0), "scale": (0.5, 0.8, 1.1, 1.4)},
            "affine, four shears": {"degrees": 5.0, "shear": (-5.0, 5.0, 10.0, 20.0)},
        },
        steps(
            warped,
            degrees=ranges(-90.0, 90.0),
            translate=st.none() | st.just((0.2, 0.3)),
            scale=st.none() | ranges(0.5, 1.5) | st.just((0.5, 0.8, 1.1, 1.4)),
            shear=st.none() | ranges(-20.0, 20.0) | st.just((-5.0, 5.0, 10.0, 20.0)),
            **WARPED,
        ),
        alone=False,
    ),
    Case(
        K.RandomShear,
        "shear resample same_on_batch align_corners padding_mode p keepdim",
        {"shear": {"shear": (-10.0, 20.0)}, "shear, both": {"shear": (-10.0, 20.0, 5.0, 15.0)}},
        steps(warped, shear=ranges(-30.0, 30.0), **WARPED),
        alone=False,
    ),
    Case(
        K.RandomTranslate,
        "translate_x translate_y resample same_on_batch align_corners padding_mode p keepdim",
        {
            "translate": {"translate_x": (-0.2, 0.3), "translate_y": (-0.1, 0.1)},
            "translate, down": {"translate_y": (-0.3, 0.1)},
        },
        steps(warped, translate_x=st.none() | ranges(-0.5, 0.5), translate_y=ranges(-0.5, 0.5), **WARPED),
        alone=False,
    ),
    Case(
        K.RandomPerspective,
        "distortion_scale resample same_on_batch align_corners p keepdim sampling_method",
        {
            "perspective": {"distortion_scale": 0.5},
            "perspective, outwards": {"distortion_scale": 0.6, "sampling_method": "area_preserving"},
        },
        steps(
            warped, distortion_scale=numbers(0.0, 0.4), sampling_method=st.sampled_from(["basic", "area_preserving"]), **SAMPLED
        ),
    ),
]


def with_means(fixed):
    """Steps of a normalisation: with one mean, or with one for each of three channels."""
    of_three = steps({**fixed, "rgb": True}, {}, mean=st.just(MEAN), std=st.just(STD))
    return either(steps(fixed, {}, mean=st.just(0.5), std=st.just(0.25)), of_three)


POINTWISE = [
    Case(
        K.RandomBrightness,
        "brightness clip_output same_on_batch p keepdim",
        {"brightness": {"brightness": (0.5, 1.5)}},
        steps(
            lambda drawn: {"own": ROUNDING, "reach": 1.0 if drawn["clip_output"] else None},
            brightness=ranges(0.3, 1.7),
            clip_output=st.booleans(),
        ),
        more_pixels={"brightness, not clipped": {"brightness": (0.5, 1.5), "clip_output": False}},
        alone=False,
    ),
    Case(
        K.RandomContrast,
        "contrast clip_output same_on_batch p keepdim",
        {"contrast": {"contrast": (0.5, 1.7)}},
        steps(
            lambda drawn: {"own": ROUNDING, "gain": 2.0, "reach": 1.0 if drawn["clip_output"] else None},
            contrast=ranges(0.0, 2.0),
            clip_output=st.booleans(),
        ),
        more_pixels={"contrast, not clipped": {"contrast": (0.5, 1.5), "clip_output": False}},
        alone=False,
    ),
    Case(
        K.RandomSaturation,
        "saturation same_on_batch p keepdim",
        {"saturation": {"saturation": (0.2, 1.8)}},
        steps({"own": ROUNDING, "gain": 6.0, "rgb": True}, saturation=ranges(0.0, 2.0)),
        jumps=True,
        alone=False,
    ),
    Case(
        K.RandomHue,
        "hue same_on_batch p keepdim",
        {"hue": {"hue": (-0.5, 0.5)}},
        steps({"own": ROUNDING, "gain": 4.0, "rgb": True}, hue=ranges(-0.5, 0.5)),
        more_draws={"hue, more to one side": {"hue": (-0.5, 0.3)}},
        jumps=True,
        alone=False,
    ),
    Case(
        K.RandomGamma,
        "gamma gain same_on_batch p keepdim",
        {"gamma": {"gamma": (0.3, 2.5), "gain": (0.5, 1.5)}},
        # Of an exponent below one the slope is without bound where an image is black.
        steps(
            lambda drawn: {"own": ROUNDING, "gain": 4.0, "jumps": drawn["gamma"][0] < 1},
            gamma=ranges(0.5, 2.5),
            gain=ranges(0.5, 1.5),
        ),
        alone=False,
    ),
    Case(
        K.RandomGrayscale,
        "rgb_weights same_on_batch p keepdim",
        {"grey": {}},
        steps({"own": ROUNDING, "reach": None, "rgb": True}, rgb_weights=st.none() | st.just(torch.tensor([0.5, 0.25, 0.25]))),
        more_pixels={"grey, weighted": {"rgb_weights": torch.tensor([0.5, 0.25, 0.25])}},
        alone=False,
    ),
    Case(
        K.RandomInvert,
        "max_val same_on_batch p keepdim",
        {"invert": {}},
        steps({"own": ROUNDING, "reach": None}, max_val=st.sampled_from([1.0, 0.5])),
        more_pixels={"invert, of two": {"max_val": 2.0}},
        exact=True,
        alone=False,
    ),
    Case(
        K.RandomSolarize,
        "thresholds additions same_on_batch p keepdim",
        {"solarize": {"thresholds": 0.3, "additions": 0.2}},
        steps({"own": ROUNDING, "jumps": True}, thresholds=ranges(0.0, 1.0), additions=ranges(-0.5, 0.5)),
        more_draws={"solarize, bounds": {"thresholds": (0.2, 0.9), "additions": (-0.4, 0.1)}},
        jumps=True,
    ),
    Case(
        K.RandomSnow,
        "snow_coefficient brightness same_on_batch p keepdim",
        {"snow": {"snow_coefficient": (0.2, 0.8), "brightness": (1.0, 3.0)}},
        steps(
            {"own": ROUNDING, "gain": 8.0, "jumps": True, "rgb": True},
            snow_coefficient=ranges(0.0, 1.0),
            brightness=ranges(1.0, 3.0),
        ),
    ),
    Case(
        K.RandomPosterize,
        "bits same_on_batch p keepdim",
        {"posterize": {"bits": (0.0, 8.0)}, "posterize, three bits": {"bits": 3}},
        steps({"jumps": True}, bits=ranges(0.0, 8.0)),
        exact=True,
    ),
    Case(K.RandomChannelShuffle, "same_on_batch p keepdim", {"shuffle": {}}, steps({"reach": None, "rgb": True}), exact=True),
    Case(
        K.RandomChannelDropout,
        "num_drop_channels fill_value same_on_batch p keepdim",
        {"dropout": {}, "dropout of two": {"num_drop_channels": 2, "fill_value": 0.5}},
        steps(MOVES, num_drop_channels=st.sampled_from([1, 1, 2]), fill_value=st.sampled_from([0.0, 0.5])),
        exact=True,
        alone=False,
    ),
    Case(
        K.RandomGaussianNoise,
        "mean std same_on_batch p keepdim",
        {"noise": {"mean": 0.1, "std": 0.3}, "noise, same": {"mean": 0.1, "std": 0.3, "same_on_batch": True}},
        steps({"own": ROUNDING, "reach": None}, mean=st.sampled_from([0.0, 0.25]), std=st.sampled_from([0.0, 0.3])),
        drawn=False,
        alone=False,
    ),
    Case(
        K.RandomErasing,
        "scale ratio value same_on_batch p keepdim",
        {"erasing": {}, "erasing, wide": {"scale": (0.1, 0.9), "ratio": (2.0, 4.0), "value": 0.5}},
        steps(MOVES, scale=ranges(0.02, 1.0), ratio=ranges(0.25, 4.0), value=st.sampled_from([0.0, 0.5])),
        more_pixels={"erasing, same": {"same_on_batch": True}},
        more_draws={"erasing, all": {"scale": (0.9, 1.5), "ratio": (0.9, 1.5)}},
        exact=True,
        alone=False,
    ),
    Case(
        K.Normalize,
        "mean std p keepdim",
        {"normalize, one": {"mean": 0.5, "std": 0.25}, "normalize": {"mean": MEAN, "std": STD}},
        with_means({"own": 5 * ROUNDING, "gain": 4.5, "reach": None}),
        drawn=False,
        atol=ROUNDING / 0.22,
        alone=False,
    ),
    Case(
        K.Denormalize,
        "mean std p keepdim",
        {"denormalize, one": {"mean": 0.5, "std": 0.25}, "denormalize": {"mean": MEAN, "std": STD}},
        with_means({"own": ROUNDING, "reach": None}),
        drawn=False,
        alone=False,
    ),
]


def jittered(kind):
    return steps(
        {"own": 3 * ROUNDING, "gain": 20.0, "spreads": kind is K.ColorJitter, "rgb": True},
        brightness=st.sampled_from([0.0, 0.4]),
        contrast=st.sampled_from([0.0, 0.4]),
        saturation=st.sampled_from([0.0, 0.4]),
        hue=st.sampled_from([0.0, 0.1, 0.5]),
        order=st.none() | st.lists(st.integers(0, 3), unique=True),
    )(kind)


JITTER_PARAMETERS = "brightness contrast saturation hue same_on_batch p keepdim order"
JITTER = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}

JITTERS = [
    Case(
        K.ColorJitter,
        JITTER_PARAMETERS,
        {"jitter": JITTER},
        jittered,
        more_pixels={
            "jitter, no hue": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4},
            "jitter, contrast": {"contrast": (0.2, 3.0)},
            "jitter, nothing": {},
            "jitter, ordered": {**JITTER, "order": (3, 1, 0)},
            "jitter, empty order": {**JITTER, "order": ()},
            "jitter, same": {**JITTER, "same_on_batch": True},
        },
        more_draws={
            "jitter, each its own": {"brightness": 0.4, "contrast": (0.2, 3.0), "saturation": 0.7, "hue": 0.1},
            "jitter, hue alone": {"hue": (-0.1, 0.4)},
        },
        jumps=True,
        alone=False,
    ),
    Case(
        K.ColorJiggle,
        JITTER_PARAMETERS,
        {"jiggle": JITTER},
        jittered,
        more_pixels={"jiggle, ordered": {**JITTER, "order": (2, 0)}, "jiggle, empty order": {**JITTER, "order": ()}},
        more_draws={"jiggle, each its own": {"brightness": 0.4, "contrast": 0.6, "saturation": (0.1, 2.0), "hue": 0.5}},
        jumps=True,
    ),
]

NEIGHBOURS = [
    Case(
        K.RandomGaussianBlur,
        "kernel_size sigma border_type separable same_on_batch p keepdim",
        {"blur": {"kernel_size": (5, 3), "sigma": (0.1, 2.0)}},
        steps(
            {"own": ROUNDING, "reach": None, "spreads": True},
            kernel_size=st.tuples(*[st.sampled_from([1, 3, 5, 11])] * 2),
            sigma=ranges(0.3, 3.0),
            border_type=st.sampled_from(["constant", "reflect", "replicate", "circular"]),
        ),
        alone=False,
    ),
    Case(
        K.RandomEqualize, "same_on_batch p keepdim", {"equalize": {}}, steps({"own": ROUNDING, "of_exact": True}), alone=False
    ),
    Case(
        K.RandomClahe,
        "clip_limit grid_size slow_and_differentiable same_on_batch p keepdim",
        {"CLAHE": {"clip_limit": (1.0, 9.0)}},
        steps(
            {"own": ROUNDING, "of_exact": True, "spreads": True},
            clip_limit=ranges(0.0, 8.0),
            grid_size=st.tuples(*[st.integers(1, 4)] * 2),
        ),
        alone=False,
    ),
    Case(
        K.RandomAutoContrast,
        "clip_output same_on_batch p keepdim",
        {"auto contrast": {}},
        steps({"own": ROUNDING, "of_exact": True}, clip_output=st.booleans()),
        alone=False,
    ),
    Case(
        K.RandomSharpness,
        "sharpness same_on_batch p keepdim",
        {"sharpness": {"sharpness": (0.5, 4.0)}, "sharpness, one number": {"sharpness": 0.7}},
        steps({"own": ROUNDING, "gain": 5.0, "spreads": True}, sharpness=ranges(0.0, 3.0)),
        alone=False,
    ),
]

MIXES = [
    Case(
        K.RandomMixUpV2,
        "lambda_val same_on_batch p keepdim data_keys",
        {"mixup": {"lambda_val": (0.2, 0.7)}},
        steps({"own": ROUNDING, "reach": None, "spreads": True}, lambda_val=ranges(0.0, 1.0)),
        alone=False,
    ),
    Case(
        K.RandomCutMixV2,
        "num_mix cut_size beta same_on_batch p keepdim data_keys use_correct_lambda",
        {
            "cutmix": {"cut_size": (0.1, 0.8), "beta": 0.7, "use_correct_lambda": True},
            "cutmix, plain": {"use_correct_lambda": True},
        },
        steps(MOVES, use_correct_lambda=st.just(True), cut_size=st.none() | ranges(0.0, 0.9)),
        exact=True,
        alone=False,
    ),
]


def by_name(pairs):
    """A dict of pairs whose names differ."""
    found = {}
    for name, value in pairs:
        assert name not in found, f"{name} is there twice"
        found[name] = value
    return found


CASES = by_name((case.kind, case) for case in (*GEOMETRY, *POINTWISE, *JITTERS, *NEIGHBOURS, *MIXES))
"""The case of each class."""


def table(settings_of):
    """(case, settings) by name, of what ``settings_of`` returns for each case."""
    return by_name((name, (case, settings)) for case in CASES.values() for name, settings in settings_of(case).items())
