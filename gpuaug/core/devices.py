"""Devices: which one a program means, which GPU is current, and on which GPUs Triton cannot run."""

from typing import Any

import torch
from torch import cuda

from gpuaug.core.errors import ArgumentError, DeviceError, shown

WITHOUT_TRITON: dict[torch.device, str] = {}
"""Text of the warning or the error about each GPU on which ``gpuaug.fuse`` has tried Triton in vain."""


def plain_torch_reason(device: torch.device) -> str | None:
    """Return why ``gpuaug.fuse`` runs in plain torch on a GPU, and what to install; ``None`` unless it tried Triton in vain."""
    return WITHOUT_TRITON.get(with_index(device)) if WITHOUT_TRITON else None


def resolve(device: torch.device | str | int | None) -> torch.device:
    """The device that ``device`` means now, with its index: this machine's accelerator for ``None``, or the CPU without one.

    Raises:
        ArgumentError: If it is not a device.
        DeviceError: If this machine does not have it.
    """
    return with_index(requested(device))


def with_index(device: torch.device) -> torch.device:
    """``device`` with the index of the GPU that is current on the calling thread, where it is one and has no index."""
    return torch.device("cuda", cuda.current_device()) if device.type == "cuda" and device.index is None else device


def requested(device: torch.device | str | int | None) -> torch.device:
    """The device that ``device`` means, with an index only if it has one. Makes no CUDA context.

    Raises:
        ArgumentError: If it is not a device.
        DeviceError: If this machine does not have it.
    """
    if device is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = found or "cpu"
    try:
        wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if isinstance(device, bool) or (wanted.index or 0) < 0:
            raise TypeError  # torch takes True for 1, and has 8 bits for an index
    except (RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(f"device must be a torch device, got {shown(device)}. Write 'cuda', 'cuda:1' or 'cpu'.") from error
    if wanted.type == "cuda":
        count = cuda.device_count() if cuda.is_available() else 0
        if (wanted.index or 0) >= count:
            wanted = torch.device("cuda", wanted.index or 0)
            have = ", ".join(f"cuda:{i}" for i in range(count)) or "no CUDA device"
            raise DeviceError(f"device must be one that this machine has, got {wanted}. It has {have}; 'cpu' always works.")
        return wanted
    module: Any = getattr(torch, wanted.type, None)
    if wanted.type != "cpu" and not (hasattr(module, "is_available") and module.is_available()):
        raise DeviceError(f"device must be one that this machine has, got {wanted}. 'cpu' always works.")
    return torch.device("cpu") if wanted.type == "cpu" else wanted  # there is only one, however it is numbered


def current_device() -> int:
    """The index of the GPU that is current on the calling thread. CUDA must have been initialised."""
    return int(torch._C._cuda_getDevice())
