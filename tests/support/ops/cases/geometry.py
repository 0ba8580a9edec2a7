"""Cases of ``ops/crop.py``, ``ops/resize.py`` and ``ops/warp.py``: see ``op_case.py``."""

import kornia.augmentation as K
from hypothesis import strategies as st
from support.ops.op_case import Case
from support.ops.random_steps import (
    ALWAYS,
    FILTERS,
    MOVES,
    SIDES,
    SURE,
    numbers,
    padded,
    ranges,
    steps,
    warped,
)

PADDING = st.none() | st.integers(0, 7) | st.tuples(*[st.integers(0, 7)] * 2) | st.tuples(*[st.integers(0, 7)] * 4)
SAMPLED = {"resample": FILTERS, "align_corners": st.booleans()}
WARPED = {**SAMPLED, "padding_mode": st.sampled_from(["zeros", "border"])}

FLIP = "p p_batch same_on_batch keepdim"

CASES = [
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
        padded("pad_mode", "pad_value", {}, st.tuples(*[st.integers(4, 40)] * 2), crop_if_exceeds=st.booleans()),
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
