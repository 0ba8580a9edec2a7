"""Cases of ``ops/positional.py``: see ``op_case.py``."""

import kornia.augmentation as K
from hypothesis import strategies as st
from support.ops.op_case import Case
from support.ops.random_steps import (
    MOVES,
    ROUNDING,
    numbers,
    ranges,
    steps,
)

GAINS = ranges(0.0, 1.0)
SIGNS = ranges(-1.0, 1.0)

CASES = [
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
        K.RandomSaltAndPepperNoise,
        "amount salt_vs_pepper p same_on_batch keepdim",
        {
            "noise, salt and pepper": {"amount": (0.2, 0.7), "salt_vs_pepper": (0.1, 0.8)},
            "noise, salt and pepper, same": {"amount": 0.5, "salt_vs_pepper": 0.3, "same_on_batch": True},
        },
        steps(MOVES, amount=ranges(0.0, 1.0), salt_vs_pepper=numbers(0.0, 1.0)),
        more_pixels={"noise, pepper everywhere": {"amount": 1.0, "salt_vs_pepper": 0.0}},
        drawn=False,
        exact=True,
    ),
    Case(
        K.RandomLinearIllumination,
        "gain sign p same_on_batch keepdim",
        {"linear light": {"gain": (0.2, 0.8), "sign": (-0.9, 0.4)}},
        steps({"own": ROUNDING}, gain=GAINS, sign=SIGNS),
        drawn=False,
    ),
    Case(
        K.RandomLinearCornerIllumination,
        "gain sign p same_on_batch keepdim",
        {"light from a corner": {"gain": (0.2, 0.8), "sign": (-0.9, 0.4)}},
        steps({"own": ROUNDING}, gain=GAINS, sign=SIGNS),
        drawn=False,
    ),
    Case(
        K.RandomGaussianIllumination,
        "gain center sigma sign p same_on_batch keepdim",
        {
            "Gaussian light": {"gain": (0.2, 0.8), "sign": (-0.9, 0.4)},
            "Gaussian light, narrow": {"gain": 0.9, "center": (0.0, 1.0), "sigma": (0.01, 0.1), "sign": (-0.9, 0.1)},
            "Gaussian light, a pixel": {"gain": 0.9, "center": 0.5, "sigma": 0.0, "sign": 1.0},
        },
        steps({"own": 5e-5}, gain=GAINS, center=ranges(0.0, 1.0), sigma=ranges(0.0, 0.5), sign=SIGNS),
        drawn=False,
    ),
]
