"""Cases of ``ops/mix.py``: see ``op_case.py``."""

import kornia.augmentation as K
from hypothesis import strategies as st
from support.ops.op_case import Case
from support.ops.random_steps import (
    COMMON,
    MOVES,
    ROUNDING,
    SIDES,
    either,
    ranges,
    steps,
)


def grids(low, high):
    return st.tuples(*[st.integers(low, high)] * 2)


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
    Case(
        K.RandomMosaic,
        "output_size mosaic_grid start_ratio_range min_bbox_size data_keys p keepdim padding_mode resample align_corners "
        "cropping_mode",
        {"mosaic": {}},
        either(
            steps(MOVES, {"p": COMMON["p"]}, start_ratio_range=ranges(0.0, 1.0), mosaic_grid=grids(2, 3)),
            steps(MOVES, {"p": st.just(1.0)}, output_size=SIDES, start_ratio_range=ranges(0.0, 2.0), mosaic_grid=grids(1, 3)),
        ),
        drawn=False,
        exact=True,
    ),
    Case(
        K.RandomJigsaw,
        "grid data_keys p same_on_batch keepdim ensure_perm",
        {"jigsaw": {"grid": (2, 2)}},
        steps(MOVES, grid=st.sampled_from([(1, 2), (2, 1), (2, 2), (1, 3), (3, 2)]), ensure_perm=st.booleans()),
        more_draws={"jigsaw, any order": {"grid": (3, 1), "ensure_perm": False}, "jigsaw, three tiles": {"grid": (3, 1)}},
        exact=True,
        alone=False,
    ),
]
