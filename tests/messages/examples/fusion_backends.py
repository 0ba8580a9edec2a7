"""Advice of the backends of ``fuse``. All of it needs a GPU."""

from support.messages.registry import untried

untried("needs a GPU", "A batch must have at most … samples in all its views on a GPU")
untried(
    "needs a GPU and a machine without a compiler; see tests/fusion/backends/test_dispatch.py",
    "Install a C compiler and Python's headers",
    "Reinstall triton, or set TRITON_PTXAS_PATH",
    "Set TRITON_CACHE_DIR to a folder that can be written and is not",
    "Set TMPDIR to a folder",
    "Install the triton that this torch needs",
    "Triton compiles its kernels anew in every process",
)
