"""Pipelines drawn at random out of all ops that are lowered, and how far their output may be from Kornia's."""

from dataclasses import dataclass, replace

import kornia.augmentation as K
import torch
from hypothesis import strategies as st
from support.comparison.replay import photographs
from support.ops import op_cases
from support.ops.op_cases import CASES
from support.ops.random_steps import INTERPOLATING, Step

FRACTION = 1e-3
"""How many values of a batch may lie at a jump once an op before it is not exact."""

MOST = 2e-3
"""What any pipeline may be off by, however its errors might add up."""

FEW = 6
"""As many may in any case: the images are small, and a pixel has three values."""


RANDOM_STEPS = {kind: case.steps(kind) for kind, case in CASES.items()}

MIXES = tuple(case.kind for case in op_cases.MIXES)
"""Kornia's containers take one of them."""


@dataclass(frozen=True)
class RandomPipeline:
    """A pipeline, and images for it."""

    steps: tuple[Step, ...]
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    layout: str
    out: torch.memory_format
    seed: int

    def images(self):
        made = photographs(*self.shape, dtype=self.dtype, seed=self.seed)
        if self.layout == "channels last":
            return made.to(memory_format=torch.channels_last)
        if self.layout == "strided":
            return made.repeat_interleave(2, 3)[..., ::2]
        return made.mT.contiguous().mT if self.layout == "transposed" else made

    def tolerance(self):
        """(how far values may be apart, whether some may be further).

        An error grows with each op. Behind one that jumps, a few values may be anything, so what would spread them is left out
        of a pipeline (:func:`cases`).
        """
        error, reach, jumped = 0.0, 1.0, False
        for each in self.steps:
            jumped |= each.jumps and (error > 0 or each.kind not in (K.RandomPosterize, K.RandomSolarize))
            error = error * each.gain + each.own * max(reach, 1.0)
            reach = each.reach or reach * max(each.gain, 1.0) + 1
        return min(error, MOST), jumped


INTERPOLATION = Step(K.RandomRotation, {"degrees": 30.0, "p": 1.0}, INTERPOLATING, reach=None)


SHAPES = [(4, 3, 17, 22), (3, 1, 33, 17), (2, 3, 24, 24), (3, 3, 8, 9), (0, 3, 16, 16)]


@st.composite
def cases_of(draw, kind):
    """One op, applied to all samples or to some: alone, and, unless it needs exact input, behind an interpolation."""
    step, shape = draw(RANDOM_STEPS[kind]), draw(st.sampled_from(SHAPES))
    if draw(st.booleans()):
        step = replace(step, options={key: 1.0 if key == "p" else value for key, value in step.options.items()})
    shape = (shape[0], 3, *shape[2:]) if step.rgb else shape
    dtype, seed = draw(st.sampled_from([torch.uint8, torch.float32])), draw(st.integers(0, 2**32))
    pipelines = [(step,)] if step.of_exact else [(step,), (INTERPOLATION, step)]
    return [RandomPipeline(steps, shape, dtype, "plain", torch.contiguous_format, seed) for steps in pipelines]


@st.composite
def cases(draw):
    channels = draw(st.sampled_from([3, 3, 3, 1]))
    steps, inexact, jumped = [], False, False
    for kind in draw(st.lists(st.sampled_from(list(RANDOM_STEPS)), min_size=1, max_size=6)):
        each = draw(RANDOM_STEPS[kind])
        mixed = any(one.kind in MIXES for one in steps)
        if (
            (each.rgb and channels != 3)
            or (each.spreads and jumped)
            or (each.of_exact and inexact)
            or (each.kind in MIXES and mixed)
        ):
            continue
        jumped |= each.jumps and (inexact or each.kind not in (K.RandomPosterize, K.RandomSolarize))
        inexact |= each.own > 0
        steps.append(each)
    return RandomPipeline(
        tuple(steps) or (Step(K.RandomHorizontalFlip, {}),),
        (draw(st.integers(0, 4)), channels, draw(st.integers(1, 24)), draw(st.integers(1, 24))),
        draw(st.sampled_from([torch.uint8, torch.float32])),
        draw(st.sampled_from(["plain", "channels last", "strided", "transposed"])),
        draw(st.sampled_from([torch.contiguous_format, torch.channels_last])),
        draw(st.integers(0, 2**32)),
    )
