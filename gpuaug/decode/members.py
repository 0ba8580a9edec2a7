"""Members of a batch: replaced by type, and with bad samples replaced by good ones."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.columns import PackedTargets


def map_instances(function: Callable[[Any], Any], kind: type, batch: Batch) -> Batch:
    """A batch with ``function`` applied to each member of type ``kind``, also where ``kind`` is itself a container."""
    return batches.map_members(function, lambda value: isinstance(value, kind), batch)


def with_samples_from(sources: NDArray[np.int64], batch: Batch, decoded: type) -> Batch:
    """A host batch whose sample ``i`` is sample ``sources[i]`` of ``batch``.

    Tensors, arrays, lists and tuples of length B are taken to hold one entry per sample; other members are left as they are.

    Args:
        sources: (B,) index of the sample that each sample is replaced by.
        batch: Any nesting of containers.
        decoded: Type of the leaves that already have the replaced samples.
    """
    index = torch.from_numpy(sources)
    count = len(sources)

    def of_samples(value: Any) -> bool:
        return isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 0 and len(value) == count

    def replaced(value: Any, *, outermost: bool) -> Any:
        if isinstance(value, decoded):
            return value
        if of_samples(value):
            return value[index] if isinstance(value, torch.Tensor) else value[sources]
        if not isinstance(value, tuple | list) or batches.is_namedtuple(value):
            return None
        # A list of length B may also hold members instead of samples: B views, or a tuple of B members as a list.
        inside = batches.leaves(value)
        members = outermost or any(isinstance(leaf, decoded) for leaf in inside) or (value and all(map(of_samples, value)))
        if len(value) != count or members:
            return None
        return type(value)(value[source] for source in sources.tolist())

    def walk(value: Any, *, outermost: bool) -> Any:
        value = value.unpacked() if isinstance(value, PackedTargets) else value
        made = replaced(value, outermost=outermost)
        if made is not None:
            return made
        if not batches.is_container(value):
            return value
        members = {name: walk(batches.member(value, name), outermost=False) for name in batches.member_names(value)}
        return batches.replace(value, members) if members else value

    return walk(batch, outermost=True)
