"""The copy lane's work: a batch from the host to the device, leaf by leaf, with many small leaves in one go."""

import inspect
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gpuaug import batch as batches
from gpuaug.batch import Batch
from gpuaug.errors import DeviceError, GpuAugWarning

SMALL_BYTES = 32 * 1024
"""Leaves up to this size are packed. Above it a copy of its own costs less than another copy on the host."""

FEWEST_TO_PACK = 4
"""Packing costs about as much host time as three copies, so it starts to pay at four."""

ALIGN_BYTES = 256
"""Start of each packed leaf: vectorised kernels take their fast path on memory that is aligned as fresh memory is."""

PAGEABLE_WARN_BYTES = 64 * 1024
"""The driver stages smaller pageable copies without waiting, so they are not worth a warning."""

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


class Copier:
    """Moves batches to ``device``.

    A tensor keeps its type, strides and place. An object with a ``to`` method is moved by it. Any other leaf stays on the host,
    and the first batch logs which.

    Cost:
        For each tensor one asynchronous copy and about 10 µs of host time; four or more small ones share one copy. The host
        waits only for memory that is not page-locked, which is warned about once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._non_blocking = device.type == "cuda"
        self._examined = False
        self._takes_non_blocking: dict[type, bool] = {}

    def copy(self, batch: Batch) -> Copied:
        """Queue the copy of ``batch`` on the current stream.

        Raises:
            DeviceError: If a leaf is on another accelerator.
        """
        if not self._examined:
            self._examine(batch)
            self._examined = True
        copied = Copied(None)
        # One tensor that stands in two places of a batch stays one tensor.
        moved: dict[int, Any] = self._pack(batch, copied) if self._device.type == "cuda" else {}

        def move(leaf: Any) -> Any:
            if id(leaf) not in moved:
                moved[id(leaf)] = self._move(leaf, copied)
            return moved[id(leaf)]

        copied.batch = batches.map_leaves(move, batch)
        return copied

    def _move(self, leaf: Any, copied: Copied) -> Any:
        if isinstance(leaf, torch.Tensor):
            if leaf.device == self._device:
                if self._device.type == "cuda":
                    copied.resident.append(leaf)
                return leaf
            if leaf.device.type not in {"cpu", "meta"}:
                raise DeviceError(
                    f"A batch must be on the CPU or on {self._device}, got a tensor on {leaf.device}. "
                    f"Give the loader device={str(leaf.device)!r}, or leave the batch on the CPU."
                )
            copied.num_bytes += leaf.nbytes
            return leaf.to(self._device, non_blocking=self._non_blocking)
        if batches.moves_itself(leaf):
            kind = type(leaf)
            if kind not in self._takes_non_blocking:
                self._takes_non_blocking[kind] = _accepts_non_blocking(leaf.to)
            if self._non_blocking and self._takes_non_blocking[kind]:
                return leaf.to(self._device, non_blocking=True)
            return leaf.to(self._device)
        return leaf

    def _pack(self, batch: Batch, copied: Copied) -> dict[int, Any]:
        small = {id(leaf): leaf for leaf in batches.leaves(batch) if _can_be_packed(leaf)}
        if len(small) < FEWEST_TO_PACK:
            return {}
        packed, starts = pack(list(small.values()), pin=True)
        copied.num_bytes += packed.nbytes
        parts = unpack(packed.to(self._device, non_blocking=True), list(small.values()), starts)
        return dict(zip(small, parts, strict=True))

    def _examine(self, batch: Batch) -> None:
        """Say once what the first batch shows: leaves that stay behind, and memory that makes the host wait."""
        staying = [
            f"{path or 'the batch'} ({type(leaf).__name__})"
            for path, leaf in batches.named_leaves(batch)
            if not isinstance(leaf, torch.Tensor) and not batches.moves_itself(leaf)
        ]
        if staying:
            more = f" and {len(staying) - MOST_NAMED} more" if len(staying) > MOST_NAMED else ""
            _log.info("These leaves of a batch stay on the host, as they are: %s%s", ", ".join(staying[:MOST_NAMED]), more)
        if self._device.type != "cuda":
            return
        pageable = sum(
            leaf.nbytes
            for leaf in batches.tensors(batch)
            if leaf.device.type == "cpu" and not _can_be_packed(leaf) and not leaf.is_pinned()
        )
        if pageable > PAGEABLE_WARN_BYTES:
            warnings.warn(
                f"Batches must be page-locked for their copy to overlap with training, got {pageable / 1e6:.1f} MB that are "
                "not in the first one. Pass pin_memory=True to the DataLoader.",
                GpuAugWarning,
                stacklevel=2,
            )


def pack(leaves: Sequence[torch.Tensor], *, pin: bool) -> tuple[torch.Tensor, list[int]]:
    """Copy small tensors behind one another into one buffer of bytes.

    Args:
        leaves: Contiguous CPU tensors.
        pin: Whether the buffer is page-locked. PyTorch keeps such memory until copies from it have ended.

    Returns:
        The buffer, and where in it each tensor starts.
    """
    starts, end = [], 0
    for leaf in leaves:
        starts.append(end)
        end += math.ceil(leaf.nbytes / ALIGN_BYTES) * ALIGN_BYTES
    buffer = torch.empty(end, dtype=torch.uint8, pin_memory=pin)
    for leaf, start in zip(leaves, starts, strict=True):
        buffer[start : start + leaf.nbytes].copy_(leaf.reshape(-1).view(torch.uint8))
    return buffer, starts


def unpack(buffer: torch.Tensor, like: Sequence[torch.Tensor], starts: Sequence[int]) -> list[torch.Tensor]:
    """The tensors in ``buffer``, with the dtypes and shapes of ``like``. They share its memory, and nothing else.

    ``data`` gives each a version counter of its own: as plain views of one buffer, changing the labels in place would make
    autograd refuse a backward pass that has saved the weights.
    """
    return [
        buffer[start : start + leaf.nbytes].view(leaf.dtype).view(leaf.shape).data
        for leaf, start in zip(like, starts, strict=True)
    ]


def _can_be_packed(leaf: Any) -> bool:
    return (
        type(leaf) is torch.Tensor
        and leaf.device.type == "cpu"
        and leaf.layout is torch.strided
        and 0 < leaf.nbytes <= SMALL_BYTES
        and leaf.is_contiguous()
        and not (leaf.requires_grad or leaf.is_complex() or leaf.is_quantized or leaf.is_conj() or leaf.is_neg())
    )


def _accepts_non_blocking(to: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(to).parameters.values()
    except (TypeError, ValueError):  # a C function that does not say what it takes
        return False
    return any(p.name == "non_blocking" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
