"""``skip_first_batches`` of Accelerate, extended to ``StreamedLoader``."""

from typing import Any

from gpuaug.loader.streamed_loader import StreamedLoader


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Skip the first batches of a loader.

    Replaces ``accelerate.skip_first_batches``, which cannot skip batches of a ``StreamedLoader``.

    Args:
        dataloader: A ``StreamedLoader``, or a loader that ``accelerate.skip_first_batches`` accepts.
        num_batches: Number of batches to skip.

    Returns:
        For a ``StreamedLoader``, the same object, whose next iterator skips the batches; for other loaders, the result of
        ``accelerate.skip_first_batches``.

    Raises:
        ArgumentError, ArgumentTypeError: If ``num_batches`` is not a whole number, or negative.
    """
    from accelerate import skip_first_batches

    if not isinstance(dataloader, StreamedLoader):
        return skip_first_batches(dataloader, num_batches)
    dataloader.skip(num_batches)
    return dataloader
