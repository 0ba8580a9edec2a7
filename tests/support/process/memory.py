"""Memory that nothing has written."""

import ctypes
from contextlib import contextmanager

PERTURB = -6
"""``M_PERTURB`` of glibc."""


@contextmanager
def memory_that_held(byte):
    """Have glibc fill memory that it gives with bytes that depend on this one, as if something had been in it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)  # others than glibc have none
    mallopt(PERTURB, byte)
    try:
        yield
    finally:
        mallopt(PERTURB, 0)
