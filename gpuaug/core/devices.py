"""Devices: the argument ``device``, the current GPU, GPUs on which Triton cannot run, and waits of the host for a GPU."""

import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import cuda

from gpuaug.core.errors import LIBRARY_FILES, ArgumentError, DeviceError, shown

TRITON_FAILURES: dict[torch.device, str] = {}
"""GPU on which Triton cannot run the kernels of ``gpuaug.fuse`` → message of the warning or error about it."""


def plain_torch_reason(device: torch.device) -> str | None:
    """Return the reason why ``gpuaug.fuse`` runs in plain torch on a GPU, with advice; ``None`` if Triton works."""
    return TRITON_FAILURES.get(with_index(device)) if TRITON_FAILURES else None


def resolve(device: torch.device | str | int | None) -> torch.device:
    """Return ``device`` as a ``torch.device``, with an index for CUDA. ``None`` is the current accelerator, or else the CPU.

    Raises:
        ArgumentError: If ``device`` is not a device.
        DeviceError: If this machine does not have the device.
    """
    return with_index(as_device(device))


def with_index(device: torch.device) -> torch.device:
    """Return ``device``; for ``cuda`` without an index, the calling thread's current GPU."""
    return torch.device("cuda", cuda.current_device()) if device.type == "cuda" and device.index is None else device


def as_device(device: torch.device | str | int | None) -> torch.device:
    """Return ``device`` as a ``torch.device``, as ``resolve`` does, but without an index that ``device`` does not have.

    Creates no CUDA context.

    Raises:
        ArgumentError: If ``device`` is not a device.
        DeviceError: If this machine does not have the device.
    """
    if device is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = accelerator or "cpu"
    try:
        result = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if isinstance(device, bool) or (result.index or 0) < 0:
            raise TypeError  # torch would read True as 1, and wrap indices to 8 bits
    except (RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(f"device must be a torch device, got {shown(device)}. Write 'cuda', 'cuda:1' or 'cpu'.") from error
    if result.type == "cuda":
        count = cuda.device_count() if cuda.is_available() else 0
        if (result.index or 0) >= count:
            result = torch.device("cuda", result.index or 0)
            names = ", ".join(f"cuda:{index}" for index in range(count)) or "no CUDA device"
            raise DeviceError(f"device must be one that this machine has, got {result}. It has {names}; 'cpu' always works.")
        return result
    module: Any = getattr(torch, result.type, None)
    if result.type != "cpu" and not (hasattr(module, "is_available") and module.is_available()):
        raise DeviceError(f"device must be one that this machine has, got {result}. 'cpu' always works.")
    return torch.device("cpu") if result.type == "cpu" else result  # every index of "cpu" is the same device


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work. Returns at once on a CPU."""
    if device.type == "mps":
        torch.mps.synchronize()  # its only device
    elif device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


@contextmanager
def host_waits() -> Iterator[list[str]]:
    """Context manager that yields a list. At each wait of the host for a GPU, ``file:line`` of the user's code is added to it.

    The waits are found by PyTorch's sync debug mode, which warns about waits, except explicit waits for an event or a stream.
    Other warnings are shown as outside of the context.
    """
    lines: list[str] = []
    show = warnings.showwarning

    def record(message: Any, *args: Any, **options: Any) -> None:
        # PyTorch warns within the operation that waits, so the stack has the user's line.
        if "synchronizing CUDA operation" in str(message):
            lines.append(user_line(traceback.extract_stack()[:-1]))
        else:
            show(message, *args, **options)

    mode_before = cuda.get_sync_debug_mode()
    restoring = warnings.catch_warnings()
    try:
        with restoring:
            warnings.filterwarnings("always", message="called a synchronizing CUDA operation")
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            warnings.showwarning = record
            if mode_before == 0:  # off; a mode that the user has set stays
                cuda.set_sync_debug_mode("warn")
            yield lines
            cuda.set_sync_debug_mode(mode_before)
    except BaseException:  # including an interrupt while the mode or the warnings were being restored
        cuda.set_sync_debug_mode(mode_before)
        with suppress(RuntimeError, AttributeError):  # the context manager had not been entered
            restoring.__exit__(None, None, None)
        raise


def user_line(stack: Sequence[traceback.FrameSummary]) -> str:
    """Return ``file:line`` of the innermost frame outside torch and this package."""
    user_frames = [frame for frame in stack if not frame.filename.startswith(LIBRARY_FILES)]
    innermost = (user_frames or stack)[-1]
    return f"{innermost.filename}:{innermost.lineno}"
