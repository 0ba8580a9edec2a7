"""Folder for compiled kernels of Triton. Not in ``launch.py``, because this module changes the environment of the process."""

import atexit
import os
import shutil
import tempfile
from contextlib import suppress

from triton import knobs

from gpuaug.core.errors import warn


def use_writable_cache() -> None:
    """Set ``TRITON_CACHE_DIR`` to a temporary folder if Triton cannot write files to its cache, or load code from it.

    The cache is ``~/.triton/cache`` by default, and containers often have a home directory that is read-only or belongs to
    another user. Kernels that are in the cache already are used. The temporary folder is deleted at the end of the process.

    Warns:
        GpuAugWarning: If ``TRITON_CACHE_DIR`` was set.
    """
    folder = knobs.cache.dir
    reason = _unusable_reason(folder)
    if reason is None:
        return
    try:
        temporary = tempfile.mkdtemp(prefix="triton-")
    except OSError:  # Triton will raise an error for its own folder
        return
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    if _unusable_reason(temporary) is not None:
        return
    if not is_noexec(folder):  # an image may come with compiled kernels, and without a compiler
        with suppress(OSError):  # the folder does not exist, or cannot be read
            for key in os.listdir(folder):
                os.symlink(os.path.join(os.path.abspath(folder), key), os.path.join(temporary, key))
    os.environ["TRITON_CACHE_DIR"] = temporary
    warn(
        f"Triton compiles its kernels anew in every process, because its cache {folder} {reason}. "
        "Set TRITON_CACHE_DIR to a folder that lasts, can be written and is not mounted noexec."
    )


def _unusable_reason(folder: str) -> str | None:
    """Return the reason why Triton cannot write a file in a folder and load code from it, or ``None``."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"cannot be written ({type(error).__name__}: {error})"
    return "is on a file system that is mounted noexec" if is_noexec(folder) else None


def is_noexec(path: str) -> bool:
    """Return whether a path is on a file system that is mounted noexec, from which no code can be loaded."""
    return hasattr(os, "statvfs") and os.path.exists(path) and bool(os.statvfs(path).f_flag & os.ST_NOEXEC)
