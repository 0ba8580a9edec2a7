"""The way of each sample through the two buffers that passes read from and write to."""

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from support import internals
from support.ops.pipelines import CLOSE
from torchvision.transforms import v2

import gpuaug
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.table.rows import draws_of_plan_ops, make_table

TO_FLOAT = v2.ToDtype(torch.float32, scale=True)
LEAVING = {
    "filters": CLOSE["filters, each for some"],
    "a policy": lambda: [v2.RandomResizedCrop((24, 24)), v2.RandAugment(3), TO_FLOAT, v2.Normalize([0.5], [0.25])],
    "pairs of a policy": lambda: [v2.AutoAugment(), TO_FLOAT],
    "an op for all": lambda: [K.RandomInvert(), K.RandomEqualize(p=0.3), K.RandomSharpness(p=1.0), K.RandomAutoContrast(p=0.3)],
}
SIZE = Size(40, 3, 30, 41)


def passes_and_rows(modules, seed=0):
    augment = gpuaug.fuse(modules)
    plan = internals.program(augment).segments.whole_plan(SIZE, masks=False, views=1)
    drawn = draws_of_plan_ops(internals.program(augment).lowered_ops, internals.drawn(augment.draw(SIZE.shape, seed=seed)))
    return plan.passes, drawn, make_table(plan, SIZE, drawn, torch.device("cpu"), has_points=False).numpy()


@pytest.mark.parametrize("name", LEAVING)
def test_each_pass_finds_a_sample_where_the_last_one_that_applied_to_it_left_it(name):
    passes, drawn, table = passes_and_rows(LEAVING[name]())
    place, skipped = np.zeros(SIZE.batch, int), 0
    for step in passes[1:-1]:
        way = step.columns_of(table)[:, step.route_column].astype(int)
        applies = np.any([drawn[op]["apply_mask"] for op in step.ops], axis=0)
        assert ((way > 0) == applies).all()
        found, left = (way - 1) & 1, (way - 1) >> 1
        assert (found == place)[applies].all()
        assert (left == (found if step.works_in_place else 1 - found))[applies].all()
        place, skipped = np.where(applies, left, place), skipped + (~applies).sum()
    assert (passes[-1].columns_of(table)[:, passes[-1].route_column] == 1 + place).all()
    assert skipped > 20
    assert passes[0].route_column == -1


NONE_LEFT = {
    "two passes": lambda: [K.RandomEqualize(p=0.5), K.RandomSharpness(p=0.5)],
    "all apply": lambda: [K.RandomEqualize(p=1.0), K.RandomSharpness(p=1.0), K.RandomAutoContrast(p=1.0)],
    "another size between": lambda: [K.RandomInvert(), K.RandomSharpness(p=0.5), K.CenterCrop(16), K.RandomEqualize()],
}


@pytest.mark.parametrize("name", NONE_LEFT)
def test_passes_that_can_leave_no_sample_have_no_ways(name):
    passes, _, _ = passes_and_rows(NONE_LEFT[name]())
    assert {step.route_column for step in passes} == {-1}


def test_passes_that_do_the_same_have_the_same_columns():
    passes, _, _ = passes_and_rows([v2.RandomHorizontalFlip(), v2.RandAugment(2), TO_FLOAT])
    kinds = [(type(step.front), step.point_program, step.route_column) for step in passes[1:]]
    assert kinds[:2] == kinds[3:5], "a warp with a jitter, and sharpness, for each of two picks"
