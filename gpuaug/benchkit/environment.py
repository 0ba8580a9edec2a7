"""Hardware, versions and commit of a benchmark result."""

import os
import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import gpuaug
from gpuaug.core.machine import allowed_cores, memory_bytes

_GPU_FIELDS = {
    "driver": "driver_version",
    "clock_sm_mhz": "clocks.sm",
    "clock_sm_max_mhz": "clocks.max.sm",
    "clock_memory_mhz": "clocks.mem",
    "power_limit_w": "power.limit",
    "pcie_gen": "pcie.link.gen.current",
    "pcie_gen_max": "pcie.link.gen.max",
    "pcie_width": "pcie.link.width.current",
}
"""Key in the result → field name of nvidia-smi."""


def environment(device: torch.device) -> dict[str, Any]:
    """Describe the machine, the versions and the commit. Unknown entries are ``None``.

    Call before measuring: the benchmark changes the load average and the clocks.
    """
    return {
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        **_checkout(),
        "versions": _versions(),
        "device": str(device),
        "gpu": _gpu(device),
        "cpu": _cpu(),
    }


def _checkout() -> dict[str, Any]:
    """Return the commit of gpuaug, and whether files differ from it; ``None`` for both if gpuaug is not in its own checkout."""
    if "GPUAUG_COMMIT" in os.environ:  # set by the user on a machine that has the files but no repository
        return {"commit": os.environ["GPUAUG_COMMIT"], "dirty": False}
    root = Path(gpuaug.__file__).resolve().parent.parent
    # gpuaug may be installed inside the checkout of another project, whose commit is not gpuaug's.
    top = _output("git", "-C", str(root), "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root:
        return {"commit": None, "dirty": None}
    status = _output("git", "--no-optional-locks", "-C", str(root), "status", "--porcelain")
    return {
        "commit": _output("git", "-C", str(root), "rev-parse", "HEAD"),
        "dirty": bool(status) if status is not None else None,
    }


def _versions() -> dict[str, Any]:
    """Return package → version."""
    packages = ("torchvision", "kornia", "numpy", "triton")
    return {
        "gpuaug": gpuaug.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{package: _version(package) for package in packages},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpu(device: torch.device) -> dict[str, Any] | None:
    """Return the properties of a GPU, with current clocks and limits from nvidia-smi; ``None`` for other devices."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    description: dict[str, Any] = {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "count": torch.cuda.device_count(),
    }
    # Selected by UUID, because CUDA_VISIBLE_DEVICES renumbers devices for CUDA but not for nvidia-smi.
    values = _output(
        "nvidia-smi",
        f"--id=GPU-{properties.uuid}",
        f"--query-gpu={','.join(_GPU_FIELDS.values())}",
        "--format=csv,noheader,nounits",
    )
    fields = values.split(", ") if values else []
    if len(fields) != len(_GPU_FIELDS):
        fields = [""] * len(_GPU_FIELDS)
    description |= {key: value if key == "driver" else _number(value) for key, value in zip(_GPU_FIELDS, fields, strict=True)}
    description["driver"] = description["driver"] or None
    return description


def _cpu() -> dict[str, Any]:
    """Return the properties and the load of the CPU."""
    return {
        "model": _cpu_model() or platform.processor() or platform.machine(),
        "cores_allowed": allowed_cores(),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        "memory_bytes": memory_bytes(),
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "torch_threads": torch.get_num_threads(),
        "system": platform.system(),
    }


def _cpu_model() -> str | None:
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    return None


def _number(text: str) -> float | None:
    """Return a value of nvidia-smi as a number; ``None`` if it is unknown."""
    try:
        return float(text)
    except ValueError:  # nvidia-smi writes "[N/A]" for an unknown value
        return None


def _output(*command: str) -> str | None:
    """Return the standard output of a command; ``None`` if the command fails."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip()
