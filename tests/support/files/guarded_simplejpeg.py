"""simplejpeg with memory behind its buffer in which it is seen to write: a test fails then, and no process dies."""

import contextlib
import threading
from unittest import mock

import numpy as np

from gpuaug.decode.formats import jpeg

GUARD = 2**21
"""Bytes behind each buffer: more than any file of these tests decodes to."""
FILLED = 0xA5
EIGHT_FILLED = int.from_bytes(bytes([FILLED] * 8), "little")


class Guarded:
    """As the module. Notes each call that writes behind its buffer in ``overruns``."""

    def __init__(self, module):
        self._module, self.overruns, self._of_thread = module, [], threading.local()
        self.__version__ = module.__version__
        self.decode_jpeg_header = module.decode_jpeg_header

    def _memory(self, size):
        """``size`` filled bytes, and the ``GUARD`` bytes behind them. Filled once a thread: to fill them takes 0.5 ms."""
        memory = getattr(self._of_thread, "memory", None)
        if memory is None or memory.size < size + GUARD:
            memory = self._of_thread.memory = np.full(-(-size // GUARD) * GUARD + GUARD, FILLED, np.uint8)
        room = memory[-GUARD - size : -GUARD]
        room.fill(FILLED)
        return room, memory[-GUARD:].view(np.uint64)

    def decode_jpeg(self, data, colorspace, *, buffer, **options):
        room, guard = self._memory(buffer.size)
        try:
            made = self._module.decode_jpeg(data, colorspace, buffer=room.reshape(buffer.shape), **options)
        finally:  # a file that is refused may have been written in part
            if (guard != EIGHT_FILLED).any():
                self.overruns.append(f"{(guard.view(np.uint8) != FILLED).sum()} bytes behind a buffer of {buffer.shape}")
                guard.fill(EIGHT_FILLED)
        buffer[:] = room.reshape(buffer.shape)
        return buffer if made.shape == buffer.shape else buffer.reshape(-1)[: made.size].reshape(made.shape)


@contextlib.contextmanager
def guarded():
    """Fail at the end if simplejpeg has written behind a buffer. Without simplejpeg, do nothing."""
    module = jpeg.simplejpeg()
    if module is None:
        yield
        return
    double = Guarded(module)
    try:
        with mock.patch.object(jpeg, "simplejpeg", return_value=double):
            yield
    finally:
        assert not double.overruns, double.overruns[0]
