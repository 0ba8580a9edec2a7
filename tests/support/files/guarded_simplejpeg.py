"""simplejpeg with memory behind its buffer in which it is seen to write: a test fails then, and no process dies."""

import contextlib
from unittest import mock

import numpy as np

from gpuaug.decode.decoders import cpu

GUARD = 2**22
"""Bytes behind each buffer: more than any file of these tests has pixels."""
FILLED = 0xA5


class Guarded:
    """As the module. Notes each call that writes behind its buffer in ``overruns``."""

    def __init__(self, module):
        self._module, self.overruns = module, []
        self.__version__ = module.__version__
        self.decode_jpeg_header = module.decode_jpeg_header

    def decode_jpeg(self, data, colorspace, *, buffer, **options):
        memory = np.full(buffer.size + GUARD, FILLED, np.uint8)
        try:
            made = self._module.decode_jpeg(data, colorspace, buffer=memory[: buffer.size].reshape(buffer.shape), **options)
        finally:  # a file that is refused may have been written in part
            if written := int((memory[buffer.size :] != FILLED).sum()):
                self.overruns.append(f"{written} bytes behind a buffer of {buffer.shape}")
        buffer[:] = memory[: buffer.size].reshape(buffer.shape)
        return buffer if made.shape == buffer.shape else buffer.reshape(-1)[: made.size].reshape(made.shape)


@contextlib.contextmanager
def guarded():
    """Fail at the end if simplejpeg has written behind a buffer. Without simplejpeg, do nothing."""
    module = cpu.simplejpeg()
    if module is None:
        yield
        return
    double = Guarded(module)
    try:
        with mock.patch.object(cpu, "simplejpeg", return_value=double):
            yield
    finally:
        assert not double.overruns, double.overruns[0]
