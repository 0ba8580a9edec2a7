"""The module ``av`` (PyAV), imported on first use."""

from functools import cache
from typing import Any

from gpuaug.core.errors import DeviceError

INSTALL = "Run pip install 'gpuaug[video]'"


@cache
def find_module() -> Any:
    """Return the module ``av``, or ``None`` if it is not installed."""
    try:
        import av
    except ImportError:
        return None
    return av


def required_module() -> Any:
    """Return the module ``av``.

    Raises:
        DeviceError: If PyAV is not installed.
    """
    av = find_module()
    if av is None:
        raise DeviceError(f"Videos cannot be read, because PyAV is not installed. {INSTALL}.")
    return av


def open_container(source: Any) -> Any:
    """Open a video, a path or a file object, and return PyAV's input container. Metadata that is not UTF-8 raises no error."""
    av = required_module()
    # PyAV 19 has no such option, and never raises for metadata.
    options = {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
    return av.open(source, **options)
