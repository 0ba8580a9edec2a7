"""Samples that kernels skip, of values on which a weight of zero would leave a trace: they keep every bit."""

from unittest import mock

import numpy as np
from support.skipped import ANTIALIASED, OPS, fault

from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.backends.triton import backend


def failures(*, every):
    """Names of the ops whose kernels change a sample that they skip, and how."""
    few = {} if every else {"batch": 3, "calls": 1}
    with np.errstate(all="ignore"), mock.patch.object(dispatch, "run", backend.run):
        for antialias, ops in ((False, OPS), (True, ANTIALIASED)):
            for name, make in ops.items():
                if text := fault(make, antialias=antialias, **few):
                    yield f"{name}: {text}"
