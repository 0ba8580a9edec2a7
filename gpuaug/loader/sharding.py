"""Number of ranks (data-parallel processes), and whether all ranks read the same samples."""

from operator import length_hint
from typing import Any

from torch import distributed
from torch.utils.data import DataLoader, Subset

from gpuaug.feed.wrapped_loader import dataset_of

_SHARDING_ATTRIBUTES = {"rank", "num_processes", "num_replicas", "num_shards", "process_index", "world_size"}
"""Attribute names of datasets that hold only one rank's part of the samples."""


def count_ranks() -> int:
    """Return the number of processes in ``torch.distributed``, or 1 if it is not initialized."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def reads_whole_dataset(loader: Any, ranks: int) -> bool:
    """Return whether it is certain that every rank reads the whole dataset.

    ``loader``: the wrapped loader. ``ranks``: number of ranks.

    It is certain only for samplers that ``DataLoader`` itself creates. Other samplers, subclasses of ``DataLoader`` that
    override iteration, and datasets with an attribute such as ``num_shards`` may take the rank into account.
    """
    if not isinstance(loader, DataLoader) or not _is_of_torch(type(loader).__iter__):
        return False
    sampler: Any = loader.sampler
    batch_sampler = loader.batch_sampler
    if batch_sampler is not None:
        if not (_is_of_torch(type(batch_sampler)) and type(batch_sampler).__name__ == "BatchSampler"):
            return False
        sampler = getattr(batch_sampler, "sampler", None)
    if not (_is_of_torch(type(sampler)) and type(sampler).__name__ in ("SequentialSampler", "RandomSampler")):
        return False
    dataset = dataset_of(loader)
    if getattr(sampler, "replacement", False) or sampler.data_source is not loader.dataset or len(sampler) != len(dataset):
        return False
    if isinstance(dataset, Subset) and (len(dataset) - 1) * ranks < length_hint(dataset.dataset):
        return False  # the subset is at most one rank's part of the dataset
    return not any(name.lstrip("_") in _SHARDING_ATTRIBUTES for name in getattr(dataset, "__dict__", ()))


def _is_of_torch(class_or_function: Any) -> bool:
    """Return whether a class or function is defined in torch or torchdata."""
    # torchdata's loaders create torchdata's versions of torch's samplers.
    return class_or_function.__module__.split(".")[0] in ("torch", "torchdata")
