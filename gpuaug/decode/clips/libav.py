"""PyAV, imported on first use."""

from functools import cache
from typing import Any

from gpuaug.core.errors import DeviceError

INSTALL = "Run pip install 'gpuaug[video]'"


@cache
def find() -> Any:
    """The module ``av``, or ``None`` where it is not installed."""
    try:
        import av
    except ImportError:
        return None
    return av


def required() -> Any:
    """The module ``av``, which does not write to stderr.

    Raises:
        DeviceError: If it is not installed.
    """
    av = find()
    if av is None:
        raise DeviceError(f"Videos cannot be read, because PyAV is not installed. {INSTALL}.")
    return av


def opened(source: Any) -> Any:
    """An input container of a path or a file object. Metadata that is not UTF-8 is no error."""
    av = required()
    # From PyAV 19 on, metadata is never decoded strictly, and the option is gone.
    options = {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
    return av.open(source, **options)
