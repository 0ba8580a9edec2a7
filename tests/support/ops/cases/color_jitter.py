"""Cases of ``ops/color_jitter.py``: see ``op_case.py``."""

import kornia.augmentation as K
from hypothesis import strategies as st
from support.ops.op_case import Case
from support.ops.random_steps import (
    ROUNDING,
    steps,
)


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

CASES = [
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
