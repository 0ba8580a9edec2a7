"""Names that every documented example may use."""

import sys

import pytest
import torch
from torch import nn

import gpuaug

collect_ignore_glob = ["gpuaug/integrations/*.py"]  # they import frameworks, and tests/frameworks imports them


for finder in sys.meta_path:
    # pytest rewrites the assertions of all plugins. For Hypothesis that takes two seconds per process, and no test needs it.
    getattr(finder, "_must_rewrite", set()).discard("hypothesis")


@pytest.fixture(autouse=True)
def _names(doctest_namespace):
    doctest_namespace.update({name: getattr(gpuaug, name) for name in gpuaug.__all__}, torch=torch, nn=nn, gpuaug=gpuaug)
