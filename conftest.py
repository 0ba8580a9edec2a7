"""Names that every documented example may use."""

import pytest
import torch
from torch import nn

import gpuaug

collect_ignore_glob = ["gpuaug/integrations/*.py"]  # they import frameworks, and tests/frameworks imports them


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Have each worker run what follows in order, so that it alone imports and reads what those tests need."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getvalue("dist") == "load" else None


@pytest.fixture(autouse=True)
def _names(doctest_namespace):
    doctest_namespace.update({name: getattr(gpuaug, name) for name in gpuaug.__all__}, torch=torch, nn=nn, gpuaug=gpuaug)
