"""Names that every documented example may use."""

import pytest
import torch
from torch import nn

import gpuaug

collect_ignore_glob = ["gpuaug/integrations/*.py"]  # they import frameworks, and tests/frameworks imports them


@pytest.fixture(autouse=True)
def _names(doctest_namespace):
    doctest_namespace.update({name: getattr(gpuaug, name) for name in gpuaug.__all__}, torch=torch, nn=nn, gpuaug=gpuaug)
