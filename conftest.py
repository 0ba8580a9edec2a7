"""Names that every documented example may use."""

import os
import sys

import pytest
import torch
from _pytest.doctest import DoctestItem, DoctestModule
from torch import nn

import gpuaug

collect_ignore_glob = ["gpuaug/integrations/*.py"]  # they import frameworks, and tests/frameworks imports them

# Without caches of bytecode, each process compiles the package and all tests anew: ten seconds.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

for finder in sys.meta_path:
    # pytest rewrites the assertions of all plugins. For Hypothesis that takes two seconds per process, and no test needs it.
    getattr(finder, "_must_rewrite", set()).discard("hypothesis")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path, parent):
    """Look for documented examples only in files that have a prompt: to look for them in all takes a second per process."""
    nodes = yield
    has_prompt = any(isinstance(node, DoctestModule) for node in nodes) and b">>> " in file_path.read_bytes()
    return [node for node in nodes if has_prompt or not isinstance(node, DoctestModule)]


@pytest.fixture(autouse=True)
def _names(request, doctest_namespace):
    if isinstance(request.node, DoctestItem):
        doctest_namespace.update({name: getattr(gpuaug, name) for name in gpuaug.__all__}, torch=torch, nn=nn, gpuaug=gpuaug)
