"""Cases of ``ops/channel.py``: see ``op_case.py``."""

import kornia.augmentation as K
import torch
from hypothesis import strategies as st
from support.ops.op_case import MEAN, STD, Case
from support.ops.random_steps import (
    MOVES,
    ROUNDING,
    either,
    ranges,
    steps,
)


def with_means(fixed):
    """Steps of a normalisation: with one mean, or with one for each of three channels."""
    of_three = steps({**fixed, "rgb": True}, {}, mean=st.just(MEAN), std=st.just(STD))
    return either(steps(fixed, {}, mean=st.just(0.5), std=st.just(0.25)), of_three)


CASES = [
    Case(
        K.RandomGrayscale,
        "rgb_weights same_on_batch p keepdim",
        {"grey": {}},
        steps({"own": ROUNDING, "reach": None, "rgb": True}, rgb_weights=st.none() | st.just(torch.tensor([0.5, 0.25, 0.25]))),
        more_pixels={"grey, weighted": {"rgb_weights": torch.tensor([0.5, 0.25, 0.25])}},
        alone=False,
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
    Case(
        K.RandomRGBShift,
        "r_shift_limit g_shift_limit b_shift_limit same_on_batch p keepdim",
        {"RGB shift": {"r_shift_limit": 0.4, "g_shift_limit": (0.1, 0.4), "b_shift_limit": (-0.8, -0.2)}},
        steps(
            {"own": ROUNDING, "rgb": True},
            r_shift_limit=ranges(-0.5, 0.5),
            g_shift_limit=ranges(-1.5, 1.5),
            b_shift_limit=st.just(0.0),
        ),
    ),
    Case(
        K.RandomPlanckianJitter,
        "mode select_from same_on_batch p keepdim",
        {
            "Planckian jitter": {"mode": "CIED", "select_from": [-1, 3, 0]},
            "Planckian jitter, CIED": {"mode": "CIED"},
            "Planckian jitter, black body": {},
        },
        steps(
            {"own": ROUNDING, "gain": 2.0, "rgb": True},
            mode=st.sampled_from(["blackbody", "CIED"]),
            select_from=st.none() | st.just(2),
        ),
        more_pixels={"Planckian jitter, one": {"select_from": 24}},
    ),
]
