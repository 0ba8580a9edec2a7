import ctypes
import os
import sys
import time
from mmap import PAGESIZE

import numpy as np
import pytest
import torch

from gpuaug.cache.shards import RowBlock, Shard

ROW_BYTES = 2**18


@pytest.mark.skipif(sys.platform != "linux", reason="calls mincore")
def test_a_row_is_read_ahead_and_not_the_whole_file(tmp_path):
    path = tmp_path / "0-0-0.safetensors"
    rows = torch.arange(256).repeat_interleave(ROW_BYTES // 8).view(256, -1)
    ids = np.arange(768).reshape(256, 3)
    content = RowBlock(tmp_path, 0, ids, list(map(str, range(256))), (), {"rows": rows}, {}).shard_content()
    path.write_bytes(content)
    start = content.index(rows.numpy().tobytes())
    mapped = np.memmap(path, np.uint8, "r")
    flags = np.empty(-(-len(mapped) // PAGESIZE), np.uint8)

    def pages_in_memory():
        """Mask of the pages of the file that are in memory, which does not read any."""
        assert ctypes.CDLL(None).mincore(*map(ctypes.c_void_p, (mapped.ctypes.data, len(mapped), flags.ctypes.data))) == 0
        return flags % 2 == 1

    shard = Shard.read(path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    row = slice((start + 128 * ROW_BYTES) // PAGESIZE, -(-(start + 129 * ROW_BYTES) // PAGESIZE))
    if pages_in_memory()[row].any():
        pytest.skip("the file system keeps the pages in memory")
    shard.read_ahead(128)
    deadline = time.monotonic() + 60
    while not pages_in_memory()[row].all() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert pages_in_memory()[row].all()
    assert pages_in_memory().mean() < 0.5
