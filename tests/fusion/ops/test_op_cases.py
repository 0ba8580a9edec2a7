"""Every lowered class of Kornia's has its ``Case``, and what the case says reaches the tests."""

import functools

import pytest
from support.ops import pipelines
from support.ops.op_cases import CASES

from gpuaug.fusion.lower.kornia import LOWERED


@pytest.mark.parametrize("kind", LOWERED, ids=lambda kind: kind.__name__)
def test_every_lowered_class_has_a_case(kind):
    assert kind in CASES, f"add a Case of K.{kind.__name__} to the file of its family in tests/support/ops/cases/"


@functools.cache
def compared_classes():
    """Classes of the modules in the pipelines that kernels are compared on."""
    return {
        type(each)
        for group in pipelines.GROUPS
        for make in getattr(pipelines, group).values()
        for module in make()
        for each in module.modules()
    }


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_kernels_of_every_class_are_compared_with_torch(kind):
    assert kind in compared_classes(), (
        "take alone=False out of its Case, or add a pipeline with it to tests/support/ops/pipelines.py"
    )
