"""Cases of ``ops/color.py``: see ``op_case.py``."""

import kornia.augmentation as K
from hypothesis import strategies as st
from support.ops.op_case import Case
from support.ops.random_steps import (
    ROUNDING,
    ranges,
    steps,
)

CASES = [
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
]
