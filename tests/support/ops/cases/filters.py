"""Cases of ``ops/filters.py``: see ``op_case.py``."""

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
        K.RandomBoxBlur,
        "kernel_size border_type normalized same_on_batch p keepdim",
        {"box blur": {"kernel_size": (3, 5), "border_type": "constant"}},
        steps(
            {"own": ROUNDING, "reach": None, "spreads": True},
            kernel_size=st.tuples(*[st.sampled_from([1, 3, 5, 11])] * 2),
            border_type=st.sampled_from(["constant", "reflect", "replicate", "circular"]),
            normalized=st.booleans(),
        ),
    ),
    Case(
        K.RandomMedianBlur,
        "kernel_size same_on_batch p keepdim",
        {"median": {"kernel_size": (3, 3)}},
        steps({"reach": None, "spreads": True}, kernel_size=st.sampled_from([3, (5, 5)])),
        exact=True,
    ),
    Case(
        K.RandomEqualize,
        "same_on_batch p keepdim",
        {"equalize": {}},
        steps({"own": ROUNDING, "of_exact": True}),
        exact=True,
        alone=False,
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
        K.RandomMotionBlur,
        "kernel_size angle direction border_type resample same_on_batch p keepdim",
        {
            "motion blur": {"kernel_size": (3, 9), "angle": (-50.0, 170.0), "direction": (-0.9, 1.0), "border_type": "reflect"},
            "motion blur, one number": {"kernel_size": 5, "angle": 180.0, "direction": 0.5},
        },
        steps(
            {"own": ROUNDING, "reach": None, "spreads": True},
            kernel_size=st.sampled_from([3, 7, (3, 11), (4, 4)]),
            angle=ranges(-360.0, 360.0),
            direction=ranges(-1.0, 1.0),
            border_type=st.sampled_from(["constant", "reflect", "replicate", "circular"]),
            resample=st.sampled_from(["nearest", "bilinear"]),
        ),
    ),
    Case(
        K.RandomSharpness,
        "sharpness same_on_batch p keepdim",
        {"sharpness": {"sharpness": (0.5, 4.0)}, "sharpness, one number": {"sharpness": 0.7}},
        steps({"own": ROUNDING, "gain": 5.0, "spreads": True}, sharpness=ranges(0.0, 3.0)),
        alone=False,
    ),
    Case(
        K.RandomJPEG,
        "jpeg_quality same_on_batch p keepdim",
        {"JPEG": {"jpeg_quality": (5.0, 90.0)}, "JPEG, one number": {"jpeg_quality": 30.0}},
        steps({"own": ROUNDING, "of_exact": True, "spreads": True, "rgb": True}, jpeg_quality=ranges(1.0, 100.0)),
    ),
]
