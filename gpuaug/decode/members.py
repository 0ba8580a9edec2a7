"""Replacement of members of a batch by type, and of samples that cannot be decoded in all members."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.packed_targets import PackedTargets


def map_instances(function: Callable[[Any], Any], type_: type, batch: Batch) -> Batch:
    """Return a batch with ``function`` applied to each member of type ``type_``, which may itself be a container type."""
    return batches.map_members(function, lambda value: isinstance(value, type_), batch)


def with_samples_from(sources: NDArray[np.int64], batch: Batch, decoded_type: type) -> Batch:
    """Return a host batch whose sample ``i`` is sample ``sources[i]`` of ``batch``.

    Tensors, arrays, lists and tuples of length B are assumed to hold one entry per sample. Other members are not changed.

    Args:
        sources: (B,) index in ``batch`` from which each sample is taken.
        batch: Containers, nested to any depth.
        decoded_type: Type of the leaves that are not changed, because their samples are replaced when they are decoded.
    """
    index = torch.from_numpy(sources)
    count = len(sources)

    def has_samples(value: Any) -> bool:
        """Whether ``value`` is a tensor or array of length B."""
        return isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 0 and len(value) == count

    def replaced(value: Any, *, outermost: bool) -> Any:
        """Return ``value`` with its samples replaced; ``None`` if it is not a collection of B samples."""
        if isinstance(value, decoded_type):
            return value
        if has_samples(value):
            return value[index] if isinstance(value, torch.Tensor) else value[sources]
        if not isinstance(value, tuple | list) or batches.is_namedtuple(value):
            return None
        # A list of length B may also hold B fields of the batch, such as B views, each with all samples.
        has_encoded = any(isinstance(leaf, decoded_type) for leaf in batches.leaves(value))
        holds_fields = outermost or has_encoded or (value and all(map(has_samples, value)))
        if len(value) != count or holds_fields:
            return None
        return type(value)(value[source] for source in sources.tolist())

    def walk(value: Any, *, outermost: bool) -> Any:
        """Return ``value`` with the samples of all its members replaced."""
        value = value.unpacked() if isinstance(value, PackedTargets) else value
        replacement = replaced(value, outermost=outermost)
        if replacement is not None:
            return replacement
        if not batches.is_container(value):
            return value
        members = {name: walk(batches.member(value, name), outermost=False) for name in batches.member_names(value)}
        return batches.replace(value, members) if members else value

    return walk(batch, outermost=True)
