"""Reasons why Triton cannot run a kernel, with advice.

Not in the folder ``triton``, because its modules cannot be imported without Triton.
"""

import os
import textwrap
import traceback
from enum import Enum

from gpuaug.core.errors import DOCUMENTATION

MAX_QUOTED = 300
"""Maximum number of characters of Triton's error that a message quotes."""


class TritonFailure(Enum):
    """Reason why Triton cannot run a kernel. The value completes the sentence "Triton …"."""

    COMPILER = "cannot compile its C code"
    PTXAS = "cannot use its ptxas"
    CACHE = "cannot write its cache"
    LOADING = "cannot load what it compiled"
    TEMPORARY = "finds no folder for temporary files"
    IMPORT = "cannot be imported"
    OTHER = "cannot run a kernel there"

    @classmethod
    def of(cls, error: Exception) -> "TritonFailure":
        """Return the reason for an error, by the functions in its traceback.

        From Triton 3.4 to 3.8, the names of these functions are the same; the types and texts of errors are not.
        """
        for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
            module = frame.f_globals.get("__name__")
            function = frame.f_code.co_name
            if module == "tempfile":
                return cls.TEMPORARY
            if module == "triton.runtime.cache":
                return cls.CACHE
            if module == "triton.runtime.build" and function in ("_build", "_find_compiler"):
                return cls.COMPILER
            if module == "triton.backends.nvidia.compiler" and (function.startswith("get_ptxas") or function == "make_cubin"):
                return cls.PTXAS
        if isinstance(error, ImportError):
            return cls.LOADING if error.path is not None and is_noexec(error.path) else cls.IMPORT
        return cls.OTHER

    def advice(self) -> str:
        """Return the advice for the user."""
        if self is TritonFailure.COMPILER:
            return (
                "Install a C compiler and Python's headers (apt-get install gcc python3-dev, or conda install gcc_linux-64), "
                "or set CC to the path of a compiler."
            )
        if self is TritonFailure.PTXAS:
            return "Reinstall triton, or set TRITON_PTXAS_PATH (Blackwell: TRITON_PTXAS_BLACKWELL_PATH) to a ptxas that works."
        if self in (TritonFailure.CACHE, TritonFailure.LOADING):
            return "Set TRITON_CACHE_DIR to a folder that can be written and is not mounted noexec."
        if self is TritonFailure.TEMPORARY:
            return "Set TMPDIR to a folder that can be written."
        if self is TritonFailure.IMPORT:
            return "Install the triton that this torch needs: pip install triton."
        return f"See what Triton needs: {DOCUMENTATION}containers/#what-triton-needs."


def shortened(error: Exception) -> str:
    """Return the type and text of an error on one line. Shortened, because the error of ptxas contains a long command."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", MAX_QUOTED, placeholder=" …")


def is_noexec(path: str) -> bool:
    """Return whether a path is on a file system that is mounted noexec, from which no code can be loaded."""
    return hasattr(os, "statvfs") and os.path.exists(path) and bool(os.statvfs(path).f_flag & os.ST_NOEXEC)
