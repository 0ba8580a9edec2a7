"""Accelerate's function that makes a loader again, for one that cannot be."""

from typing import Any

from gpuaug.loader.streamed_loader import StreamedLoader


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """As Accelerate's of that name, and of a ``StreamedLoader`` as well.

    Args:
        dataloader: A ``StreamedLoader``, or what Accelerate takes.
        num_batches: How many batches are left out.

    Returns:
        The ``StreamedLoader`` itself, whose next iterator leaves them out; else what Accelerate returns.

    Raises:
        ArgumentError, ArgumentTypeError: If ``num_batches`` is no whole number, or negative.
    """
    from accelerate import skip_first_batches

    if not isinstance(dataloader, StreamedLoader):
        return skip_first_batches(dataloader, num_batches)
    dataloader.skip(num_batches)
    return dataloader
