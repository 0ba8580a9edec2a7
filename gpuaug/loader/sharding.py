"""The ranks that train together, and whether they read the same samples."""

from operator import length_hint
from typing import Any

from torch import distributed
from torch.utils.data import DataLoader, Subset

_OF_A_RANK = {"rank", "num_processes", "num_replicas", "num_shards", "process_index", "world_size"}
"""Attributes of datasets that hold one rank's share."""


def count_ranks() -> int:
    """Number of processes that train together."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def reads_whole_dataset(loader: Any, ranks: int) -> bool:
    """Whether every rank reads the whole dataset, for certain: through samplers that ``DataLoader`` itself makes.

    A sampler of the user's or of a framework's may know of ranks. So may a subclass that is iterated in a way of its own, and
    a dataset.
    """
    if not isinstance(loader, DataLoader) or not _is_torchs(type(loader).__iter__):
        return False
    sampler: Any = loader.sampler
    batch_sampler = loader.batch_sampler
    dataset = loader.dataset
    if batch_sampler is not None:
        if not (_is_torchs(type(batch_sampler)) and type(batch_sampler).__name__ == "BatchSampler"):
            return False
        sampler = getattr(batch_sampler, "sampler", None)
    if not (_is_torchs(type(sampler)) and type(sampler).__name__ in ("SequentialSampler", "RandomSampler")):
        return False
    if getattr(sampler, "replacement", False) or sampler.data_source is not dataset or len(sampler) != len(dataset):
        return False
    if isinstance(dataset, Subset) and (len(dataset) - 1) * ranks < length_hint(dataset.dataset):
        return False  # no more than a rank's share
    return not any(name.lstrip("_") in _OF_A_RANK for name in getattr(dataset, "__dict__", ()))


def _is_torchs(named: Any) -> bool:
    # torchdata's loaders have samplers of their own.
    return named.__module__.split(".")[0] in ("torch", "torchdata")
