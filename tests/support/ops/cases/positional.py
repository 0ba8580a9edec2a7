"""Cases of ``ops/positional.py``: see ``op_case.py``."""

import kornia.augmentation as K
from hypothesis import strategies as st
from support.ops.op_case import Case
from support.ops.random_steps import (
    MOVES,
    ROUNDING,
    ranges,
    steps,
)

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
]
