"""What a process that is forked from one with lanes does to the garbage that it inherits."""

import sys

import pytest
from support import alone

SCRIPT = """
import gc, os
from gpuaug.core.streams import spare_forked_children

class Handle:
    def __init__(self):
        self.me = self
    def __del__(self):
        os.write(1, b"freed by the child " if os.getpid() != parent else b"freed by the parent ")

parent = os.getpid()
gc.disable()
{spared}
Handle()
child = os.fork()
if not child:
    gc.collect()
    os._exit(0)
os.waitpid(child, 0)
gc.collect()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_forked_child_frees_nothing_that_is_garbage_here():
    done = alone.run(SCRIPT.format(spared="spare_forked_children()"))
    assert (done.returncode, done.stdout) == (0, "freed by the parent "), done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_who_has_lanes_on_a_device_is_spared():
    lanes = (
        "import torch; from support.stream_double import FakeCuda; from gpuaug.core import streams; streams.cuda = FakeCuda()"
    )
    done = alone.run(SCRIPT.format(spared=f"{lanes}; streams.Lanes(torch.device('cuda', 0))"))
    assert (done.returncode, done.stdout) == (0, "freed by the parent "), done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_the_test_would_see_what_a_child_frees():
    done = alone.run(SCRIPT.format(spared=""))
    assert (done.returncode, done.stdout) == (0, "freed by the child freed by the parent "), done.stderr
