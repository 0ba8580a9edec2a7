"""PyAV, imported on first use."""

from functools import cache
from typing import Any

from gpuaug.core.errors import DeviceError

INSTALL = "Run pip install 'gpuaug[video]'"


@cache
def find() -> Any:
    """Return the module ``av``, or ``None`` if it is not installed."""
    try:
        import av
    except ImportError:
        return None
    return av


def required() -> Any:
    """Return the module ``av``.

    Raises:
        DeviceError: If PyAV is not installed.
    """
    av = find()
    if av is None:
        raise DeviceError(f"Videos cannot be read, because PyAV is not installed. {INSTALL}.")
    return av


def opened(source: Any) -> Any:
    """Open the path or file object of a video. Return PyAV's input container. Metadata that is not UTF-8 raises no error."""
    av = required()
    # PyAV 19 removed the option, and never decodes metadata strictly.
    options = {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
    return av.open(source, **options)
