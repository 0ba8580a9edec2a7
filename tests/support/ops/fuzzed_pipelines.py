"""Random pipelines with images, and hostile coordinates, for the tests in ``fuzz/``."""

from dataclasses import replace

import kornia.augmentation as K
from hypothesis import strategies as st
from support.ops.random_pipelines import cases as pipelines

import gpuaug

COORDINATES = st.floats(width=32) | st.floats(-20, 20, width=32) | st.sampled_from([0.0, 8.0, 1e30, 3e38])


def fused(case, **options):
    return gpuaug.fuse(K.AugmentationSequential(*(step.make() for step in case.steps)), **options)


@st.composite
def batches(draw, **changes):
    """A pipeline, images for it, and one of them."""
    case = draw(pipelines())
    case = replace(case, shape=(max(case.shape[0], 2), draw(st.sampled_from([1, 3, 3, 3, 4])), *case.shape[2:]), **changes)
    return case, draw(st.integers(0, case.shape[0] - 1))
