"""Copy of a batch from the host to the device: small tensors are packed into one copy, others are copied one by one.

A *member* is an entry of a batch, and a *leaf* a member that is not a container, such as a tensor. *Target dicts* are
annotations, one dict per image; ``PackedTargets`` holds them as one tensor per key. *Pageable* memory is host memory that is
not page-locked: the host waits for copies from it.
"""

import copy
import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentTypeError, DeviceError, warn
from gpuaug.core.packed_targets import is_packed, pack_targets, unpack_targets
from gpuaug.core.ragged import Shapes
from gpuaug.core.targets import TargetsLayout

SMALL_BYTES = 32 * 1024
"""Largest size of a packed leaf in bytes. For a larger leaf, a separate copy costs less than packing on the host."""

MIN_PACKED_LEAVES = 8
"""Smallest number of leaves that are packed into one copy.

On the training thread, packing twelve leaves takes as long as twelve single copies.
"""

PAGEABLE_WARN_BYTES = 64 * 1024
"""Bytes of pageable memory per batch above which a warning is raised. For fewer bytes, the host does not wait."""

MAX_LOGGED_LEAVES = 8
"""Largest number of leaves that a log line lists. Further leaves are only counted."""

_log = logging.getLogger("gpuaug")


@dataclass(slots=True)
class Copied:
    """A batch on the device."""

    batch: Batch
    """The batch. It may hold ``PackedTargets`` in place of lists of target dicts, except if the batch itself is such a list."""
    packed: bool = False
    """Whether the batch holds ``PackedTargets``."""
    num_bytes: int = 0
    """Bytes that were copied to the device."""
    resident: list[torch.Tensor] = field(default_factory=list)
    """Tensors that were on the device before the copy. The copy lane has not allocated their memory."""
    has_resident_objects: bool = False
    """Whether an object with a ``to`` method was, or may have been, on the device before the copy."""


class Copier:
    """Copy batches to ``device``.

    Tensors keep their class, their strides and their position in the batch. Other objects are moved by their ``to`` method, or
    stay on the host if they have none, which is logged at the first batch.

    Args:
        device: The target device.
        warn_pageable: Whether to warn about batches in pageable memory.

    Cost:
        One asynchronous copy per tensor. Eight or more small tensors share one copy, as do the tensors of one key in a list of
        target dicts. The host waits only for copies from pageable memory, about which ``warn_pageable`` warns.
    """

    def __init__(self, device: torch.device, *, warn_pageable: bool = True) -> None:
        self._device = device
        self._non_blocking = device.type == "cuda"  # whether to request asynchronous copies
        self._first_batch_checked = False
        self._warn_pageable = warn_pageable
        self._takes_non_blocking: dict[type, bool] = {}
        """Class of an object → whether its ``to`` method has a parameter ``non_blocking``."""

    def copy(self, batch: Batch) -> Copied:
        """Queue the copy of ``batch`` on the current stream.

        Raises:
            DeviceError: If a leaf is on another accelerator.
        """
        if not self._first_batch_checked:
            self._check_first_batch(unpack_targets(batch))
            self._first_batch_checked = True
        # ``any_mask_size=False``: masks are large, so that single copies cost less than packing on this thread.
        batch = pack_targets(batch, _page_locked, any_mask_size=False) if self._non_blocking else batch
        copied = Copied(None)
        copies = self._pack(batch, copied) if self._non_blocking else {}
        copied.batch = batches.map_leaves(batches.cached_by_id(lambda leaf: self._move(leaf, copied), copies), batch)
        if is_packed(copied.batch):  # the batch itself is a list of dicts: its elements are members, which stages select
            copied.batch = unpack_targets(copied.batch)
            copied.packed = False
        return copied

    def _move(self, leaf: Any, copied: Copied) -> Any:
        """Return a copy of a leaf on the device, and update ``copied``. A leaf that cannot be moved is returned unchanged."""
        if isinstance(leaf, torch.Tensor):
            if leaf.device == self._device:
                if self._non_blocking:
                    copied.resident.append(leaf)
                return leaf
            if leaf.device.type not in {"cpu", "meta"}:
                raise DeviceError(
                    f"A batch cannot be moved to {self._device}, because it has a tensor on {leaf.device}. "
                    f"Pass device={str(leaf.device)!r} to the StreamedLoader, or leave the batch on the CPU."
                )
            copied.num_bytes += _num_bytes(leaf)
            return leaf.to(self._device, non_blocking=self._non_blocking)
        if batches.moves_itself(leaf):
            cls = type(leaf)
            if cls not in self._takes_non_blocking:
                self._takes_non_blocking[cls] = accepts_keyword(leaf.to, "non_blocking")
            is_asynchronous = self._non_blocking and self._takes_non_blocking[cls]
            # A copy, because the ``to`` of a mapping may change the mapping in place, and the user's loader may use it again.
            mover: Any = copy.copy(leaf) if isinstance(leaf, Mapping) else leaf
            moved = mover.to(self._device, non_blocking=True) if is_asynchronous else mover.to(self._device)
            if moved is None:
                raise ArgumentTypeError(
                    f"The to(device) method of {cls.__name__}, a member of the batch, must return the moved object, got None. "
                    "End the method with: return self."
                )
            copied.has_resident_objects |= moved is mover or any(
                isinstance(member, torch.Tensor) and member.device == self._device for member in batches.inner_values(leaf)
            )
            return moved
        copied.packed |= type(leaf) is TargetsLayout  # the leaf of each ``PackedTargets`` that stays on the host
        return leaf

    def _pack(self, batch: Batch, copied: Copied) -> dict[int, tuple[Any, Any]]:
        """Copy small tensors to the device in one copy. Return ``id`` of a leaf → (leaf, copy); empty if there are too few."""
        small = {id(leaf): leaf for leaf in batches.leaves(batch) if _can_be_packed(leaf)}
        if len(small) < MIN_PACKED_LEAVES:
            return {}
        copied.num_bytes += sum(leaf.nbytes for leaf in small.values())
        return copy_together(small.values(), self._device)

    def _check_first_batch(self, batch: Batch) -> None:
        """Log the leaves of the first batch that stay on the host. Warn about pageable memory, whose copy blocks the host."""
        # The ``Shapes`` of a ``Ragged`` are not logged, because they are meant to stay on the host.
        host_leaves = [
            f"{path or 'the batch'} ({type(leaf).__name__})"
            for path, leaf in batches.named_leaves(batch)
            if not isinstance(leaf, torch.Tensor | Shapes) and not batches.moves_itself(leaf)
        ]
        if host_leaves:
            more = f" and {len(host_leaves) - MAX_LOGGED_LEAVES} more" if len(host_leaves) > MAX_LOGGED_LEAVES else ""
            _log.info(
                "These leaves of a batch stay on the host, unchanged: %s%s", ", ".join(host_leaves[:MAX_LOGGED_LEAVES]), more
            )
        if self._device.type != "cuda" or not self._warn_pageable:
            return
        pageable = sum(
            _num_bytes(leaf)
            for leaf in batches.tensors(batch)
            if leaf.device.type == "cpu" and not _can_be_packed(leaf) and not leaf.is_pinned()
        )
        if pageable > PAGEABLE_WARN_BYTES:
            warn(
                f"The copy of a batch does not overlap with training, because {pageable / 1e6:.1f} MB of the first batch are "
                "not page-locked. Pass pin_memory=True to the DataLoader."
            )


def _page_locked(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor in page-locked memory."""
    # The tensor may be dropped after it is copied: PyTorch reuses its memory only after copies from it have ended.
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


def copy_together(leaves: Iterable[torch.Tensor], device: torch.device) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Copy small CPU tensors to ``device`` in one copy. Return ``id`` of a leaf → (leaf, its copy).

    The copies share the memory of one buffer. They are detached with ``.data``, which gives each copy a separate version
    counter. With a common counter, an in-place change of one copy, such as the labels, would make autograd raise an error for
    every other copy that it has saved for the backward pass.

    Cost:
        On the host, about ten tensor operations, and one more per leaf.
    """
    groups: defaultdict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    # The largest dtypes come first in the buffer, so that each group is aligned for its dtype.
    for leaf in sorted(leaves, key=lambda leaf: -leaf.itemsize):
        groups[leaf.dtype].append(leaf)
    sizes = [sum(leaf.nbytes for leaf in group) for group in groups.values()]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    for part, (dtype, group) in zip(buffer.split(sizes), groups.items(), strict=True):
        part.view(dtype).copy_(_flatten_dense_tensors(group))
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for part, (dtype, group) in zip(buffer.to(device, non_blocking=True).split(sizes), groups.items(), strict=True):
        for leaf, device_leaf in zip(group, _unflatten_dense_tensors(part.view(dtype), group), strict=True):
            copies[id(leaf)] = leaf, device_leaf.data
    return copies


def _can_be_packed(leaf: Any) -> bool:
    """Return whether a leaf is a small CPU tensor, dense and contiguous, that is fully described by its values."""
    return (
        type(leaf) is torch.Tensor
        and leaf.is_cpu
        and leaf.layout is torch.strided
        and not leaf.is_nested
        and 0 < leaf.nbytes <= SMALL_BYTES
        and leaf.is_contiguous()
        and not (leaf.requires_grad or leaf.is_quantized)
    )


def _num_bytes(leaf: torch.Tensor) -> int:
    """Return the bytes of a tensor's values; 0 for a sparse tensor."""
    return leaf.nbytes if leaf.layout is torch.strided else 0


def accepts_keyword(function: Callable[..., Any], name: str, *, if_unknown: bool = False) -> bool:
    """Return whether a function has a parameter ``name``, or ``**kwargs``; ``if_unknown`` if it has no signature."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a C function without a signature
        return if_unknown
    return name in parameters or any(item.kind is item.VAR_KEYWORD for item in parameters.values())
