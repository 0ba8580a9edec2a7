"""The copy of a batch from the host to the device: each leaf by itself, many small ones together."""

import copy
import inspect
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.columns import TargetsLayout, pack_targets, unpack_targets
from gpuaug.core.errors import ArgumentTypeError, DeviceError, GpuAugWarning
from gpuaug.core.ragged import Shapes

SMALL_BYTES = 32 * 1024
"""Most bytes of a leaf that is packed. A larger leaf's own copy costs less than packing it on the host."""

FEWEST_TO_PACK = 8
"""Fewest small leaves that are packed. With twelve, packing costs the training thread as much as single copies."""

ALIGN_BYTES = 256
"""Start of each dtype's tensors in a packed buffer, aligned for any of them."""

PAGEABLE_WARN_BYTES = 64 * 1024
"""Pageable bytes above which a warning says so. The driver stages smaller copies without waiting."""

MOST_NAMED = 8
"""Leaves that a log line names before it only counts."""

_log = logging.getLogger("gpuaug")


@dataclass(slots=True)
class Copied:
    """A batch on the device."""

    batch: Batch
    num_bytes: int = 0
    resident: list[torch.Tensor] = field(default_factory=list)
    """Leaves that were on the device already. Their memory belongs to another stream."""
    resident_objects: bool = False
    """Whether an object with a ``to`` method was, or may have been, on the device already."""


class Copier:
    """Moves batches to ``device``.

    A tensor keeps its type, strides and place. An object with a ``to`` method is moved by it. Any other leaf stays on the host,
    and the first batch logs which.

    Args:
        device: The target device.
        warns: Whether batches are expected in page-locked memory, so that others are warned about.

    Cost:
        For each tensor one asynchronous copy (``bench run handover``); eight or more small ones share one copy, and those
        under one key of a list of dicts. The host
        waits only for memory that is not page-locked, which is warned about once.
    """

    def __init__(self, device: torch.device, *, warns: bool = True) -> None:
        self._device = device
        self._non_blocking = device.type == "cuda"
        self._examined = False
        self._warns = warns
        self._takes_non_blocking: dict[type, bool] = {}

    def copy(self, batch: Batch) -> Copied:
        """Queue the copy of ``batch`` on the current stream.

        Raises:
            DeviceError: If a leaf is on another accelerator.
        """
        if not self._examined:
            self._examine(unpack_targets(batch))
            self._examined = True
        # Masks are large: their own copies cost less than packing them on this thread.
        batch = pack_targets(batch, _page_locked, masks=False) if self._non_blocking else batch
        copied = Copied(None)
        # One tensor that stands in two places of a batch stays one tensor. The leaf is kept beside its copy: some
        # mappings make their values when asked, and another object may get the id of one that has gone.
        moved: dict[int, tuple[Any, Any]] = self._pack(batch, copied) if self._non_blocking else {}

        packed = False

        def move(leaf: Any) -> Any:
            nonlocal packed
            packed |= type(leaf) is TargetsLayout
            found = moved.get(id(leaf))
            if found is None:
                found = moved[id(leaf)] = leaf, self._move(leaf, copied)
            return found[1]

        copied.batch = batches.map_leaves(move, batch)
        if packed:
            copied.batch = unpack_targets(copied.batch)
        return copied

    def _move(self, leaf: Any, copied: Copied) -> Any:
        if isinstance(leaf, torch.Tensor):
            if not (leaf.is_cpu and self._non_blocking):
                if leaf.device == self._device:
                    if self._non_blocking:
                        copied.resident.append(leaf)
                    return leaf
                if leaf.device.type not in {"cpu", "meta"}:
                    raise DeviceError(
                        f"A batch cannot be moved to {self._device}, because it has a tensor on {leaf.device}. "
                        f"Give the loader device={str(leaf.device)!r}, or leave the batch on the CPU."
                    )
            copied.num_bytes += _num_bytes(leaf)
            return leaf.to(self._device, non_blocking=self._non_blocking)
        if batches.moves_itself(leaf):
            kind = type(leaf)
            if kind not in self._takes_non_blocking:
                self._takes_non_blocking[kind] = _accepts_non_blocking(leaf.to)
            asynchronous = self._non_blocking and self._takes_non_blocking[kind]
            # A mapping's ``to`` may change it in place, and the loader may still be using it.
            mover: Any = copy.copy(leaf) if isinstance(leaf, Mapping) else leaf
            moved = mover.to(self._device, non_blocking=True) if asynchronous else mover.to(self._device)
            if moved is None:
                raise ArgumentTypeError(
                    f"The to(device) method of {kind.__name__}, a member of the batch, must return the moved object, got None. "
                    "End the method with: return self."
                )
            copied.resident_objects |= moved is mover or any(
                isinstance(member, torch.Tensor) and member.device == self._device for member in batches.members(leaf)
            )
            return moved
        return leaf

    def _pack(self, batch: Batch, copied: Copied) -> dict[int, tuple[Any, Any]]:
        leaves = batches.leaves(batch)
        if len(leaves) < FEWEST_TO_PACK:
            return {}
        small = {id(leaf): leaf for leaf in leaves if _can_be_packed(leaf)}
        if len(small) < FEWEST_TO_PACK:
            return {}
        layout = Layout(list(small.values()))
        packed = layout.pack(pin=True)
        copied.num_bytes += packed.nbytes
        parts = layout.unpack(packed.to(self._device, non_blocking=True))
        return {number: (leaf, parts[number]) for number, leaf in small.items()}

    def _examine(self, batch: Batch) -> None:
        """Log and warn at the first batch: leaves that stay on the host, and pageable memory, for which the host waits."""
        staying = [
            f"{path or 'the batch'} ({type(leaf).__name__})"
            for path, leaf in batches.named_leaves(batch)
            if not isinstance(leaf, torch.Tensor | Shapes) and not batches.moves_itself(leaf)  # sizes belong to the host
        ]
        if staying:
            more = f" and {len(staying) - MOST_NAMED} more" if len(staying) > MOST_NAMED else ""
            _log.info("These leaves of a batch stay on the host, as they are: %s%s", ", ".join(staying[:MOST_NAMED]), more)
        if self._device.type != "cuda" or not self._warns:
            return
        pageable = sum(
            _num_bytes(leaf)
            for leaf in batches.tensors(batch)
            if leaf.device.type == "cpu" and not _can_be_packed(leaf) and not leaf.is_pinned()
        )
        if pageable > PAGEABLE_WARN_BYTES:
            warnings.warn(
                f"The copy of a batch does not overlap with training, because {pageable / 1e6:.1f} MB of the first batch are "
                "not page-locked. Pass pin_memory=True to the DataLoader.",
                GpuAugWarning,
                stacklevel=2,
            )


def _page_locked(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    # PyTorch keeps it until copies from it have ended.
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


class Layout:
    """Positions of small tensors in one buffer of bytes, grouped by dtype.

    Args:
        leaves: CPU tensors.

    Cost:
        About ten tensor operations on the host, and one for each leaf.
    """

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        groups: dict[torch.dtype, list[torch.Tensor]] = {}
        for leaf in leaves:
            groups.setdefault(leaf.dtype, []).append(leaf)
        self._groups: list[tuple[torch.dtype, int, int, list[torch.Tensor]]] = []
        self._num_bytes = 0
        for dtype, members in groups.items():
            start = self._num_bytes
            size = sum(leaf.nbytes for leaf in members)
            self._groups.append((dtype, start, start + size, members))
            self._num_bytes += math.ceil(size / ALIGN_BYTES) * ALIGN_BYTES

    def pack(self, *, pin: bool) -> torch.Tensor:
        """The leaves in one new buffer, which is page-locked if ``pin``. PyTorch keeps it until copies from it have ended."""
        buffer = torch.empty(self._num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pin)
        for dtype, start, end, members in self._groups:
            buffer[start:end].view(dtype).copy_(_flatten_dense_tensors(members))
        return buffer

    def unpack(self, buffer: torch.Tensor) -> dict[int, torch.Tensor]:
        """The tensors in ``buffer``, a copy of the packed one, by the ``id`` of the leaf that each stands for.

        They share the buffer's memory, and nothing else: ``data`` gives each a version counter of its own. As plain views,
        changing the labels in place would make autograd refuse a backward pass that has saved the weights.
        """
        parts: dict[int, torch.Tensor] = {}
        for dtype, start, end, members in self._groups:
            for leaf, part in zip(members, _unflatten_dense_tensors(buffer[start:end].view(dtype), members), strict=True):
                parts[id(leaf)] = part.data
        return parts


def _can_be_packed(leaf: Any) -> bool:
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
    """Bytes of a tensor's values; 0 for a sparse one."""
    return leaf.nbytes if leaf.layout is torch.strided else 0


def _accepts_non_blocking(to: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(to).parameters.values()
    except (TypeError, ValueError):  # a C function that does not say what it takes
        return False
    return any(p.name == "non_blocking" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
