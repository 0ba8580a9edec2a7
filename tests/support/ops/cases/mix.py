"""Cases of ``ops/mix.py``: see ``op_case.py``."""

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
