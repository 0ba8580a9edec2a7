"""Advice of the backends of ``fuse``. All of it needs a GPU."""

from support.messages.registry import untried

untried("needs a GPU", "A batch must have at most … samples in all its views on a GPU")
untried(
    "needs a GPU and a machine without a compiler; see tests/fusion/backends/test_dispatch.py",
    "See what Triton needs, such as a C compiler",
    "Triton compiles its kernels anew in every process",
)
