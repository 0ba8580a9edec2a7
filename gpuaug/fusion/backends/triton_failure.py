"""Why Triton cannot run a kernel, and what to install. Apart from ``triton/``, which cannot be imported without Triton."""

import os
import textwrap
import traceback

from gpuaug.core.errors import DOCUMENTATION

LONGEST = 300
"""Most characters of Triton's own error that are repeated."""


def cause_and_advice(error: Exception) -> str:
    """Return the cause of an error that Triton raised, as the end of a sentence that begins it, and the advice behind it.

    The functions of Triton that the error passed through tell the cause: their names are the same from Triton 3.4 to 3.8, and
    the types and texts of the errors are not.
    """
    said = textwrap.shorten(f"{type(error).__name__}: {error}", LONGEST, placeholder=" …")
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        module, function = frame.f_globals.get("__name__"), frame.f_code.co_name
        if module == "tempfile":
            return f"Triton finds no folder for temporary files ({said}). Set TMPDIR to a folder that can be written."
        if module == "triton.runtime.cache":
            return f"Triton cannot write its cache ({said}). Set TRITON_CACHE_DIR to a folder that can be written."
        if module == "triton.runtime.build" and function in ("_build", "_find_compiler"):
            return (
                f"Triton cannot compile its C code ({said}). Install a C compiler and Python's headers (apt-get install gcc "
                "python3-dev, or conda install gcc_linux-64), or set CC to the path of a compiler."
            )
        if module == "triton.backends.nvidia.compiler" and (function.startswith("get_ptxas") or function == "make_cubin"):
            return (
                f"Triton's ptxas does not work ({said}). Reinstall triton, or set TRITON_PTXAS_PATH, for Blackwell "
                "TRITON_PTXAS_BLACKWELL_PATH, to a ptxas that does."
            )
    if isinstance(error, ImportError):
        if error.path is not None and is_noexec(error.path):
            return (
                f"Triton cannot load what it compiled ({said}). Set TRITON_CACHE_DIR to a folder of a file system that is not "
                "mounted noexec."
            )
        return f"Triton cannot be imported ({said}). Install the triton that this torch needs: pip install triton."
    return f"Triton cannot run a kernel there ({said}). See {DOCUMENTATION}containers/#what-triton-needs."


def is_noexec(path: str) -> bool:
    """Whether a file system lets no code run that lies on it."""
    return hasattr(os, "statvfs") and os.path.exists(path) and bool(os.statvfs(path).f_flag & os.ST_NOEXEC)
