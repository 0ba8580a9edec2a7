"""The folder in which Triton keeps what it compiles. Apart from ``launch``, because it changes the process's environment."""

import os
import tempfile
import warnings

from triton import knobs

from gpuaug.core.errors import GpuAugWarning
from gpuaug.fusion.backends.triton_failure import is_noexec

_temporary: list[tempfile.TemporaryDirectory[str]] = []
"""The folder in place of one that cannot be used. It is deleted at the end of the process."""


def use_writable_cache() -> None:
    """Set ``TRITON_CACHE_DIR`` to a temporary folder if Triton cannot write and load code in its own, ``~/.triton/cache``.

    A container often has a home directory that is read-only or belongs to another user. What is in the cache already is used.

    Warns:
        GpuAugWarning: If it was set.
    """
    folder = knobs.cache.dir
    reason = _why_not(folder)
    if reason is None:
        return
    try:
        temporary = tempfile.TemporaryDirectory(prefix="triton-", ignore_cleanup_errors=True)
    except OSError:  # Triton then raises what is wrong with its own folder
        return
    if _why_not(temporary.name) is not None:
        temporary.cleanup()
        return
    # An image may come with compiled kernels, and without a compiler.
    for key in os.listdir(folder) if os.path.isdir(folder) else ():
        os.symlink(os.path.join(os.path.abspath(folder), key), os.path.join(temporary.name, key))
    _temporary.append(temporary)
    os.environ["TRITON_CACHE_DIR"] = temporary.name
    warnings.warn(
        f"Triton compiles its kernels anew in every process, because its cache {folder} {reason}. "
        "Set TRITON_CACHE_DIR to a folder that lasts and can be written.",
        GpuAugWarning,
        stacklevel=2,
    )


def _why_not(folder: str) -> str | None:
    """Why Triton cannot write a file in a folder and load code from it, or ``None``."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"cannot be written ({type(error).__name__}: {error})"
    return "is on a file system that is mounted noexec" if is_noexec(folder) else None
