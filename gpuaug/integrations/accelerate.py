"""Accelerate's ``skip_first_batches``, which makes a loader anew, for a ``StreamedLoader``, which skips by itself."""

from typing import Any

from gpuaug.loader.streamed_loader import StreamedLoader


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Accelerate's function of that name, for a ``StreamedLoader`` too.

    Args:
        dataloader: A ``StreamedLoader``, or a loader that Accelerate's function takes.
        num_batches: Number of batches to skip.

    Returns:
        The same ``StreamedLoader``, whose next iterator skips them; for other loaders, the result of Accelerate's function.

    Raises:
        ArgumentError, ArgumentTypeError: If ``num_batches`` is no whole number, or negative.
    """
    from accelerate import skip_first_batches

    if not isinstance(dataloader, StreamedLoader):
        return skip_first_batches(dataloader, num_batches)
    dataloader.skip(num_batches)
    return dataloader
