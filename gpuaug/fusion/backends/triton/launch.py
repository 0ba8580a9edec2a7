"""Launching Triton kernels with less of the training thread's time."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor

from gpuaug.core.devices import current_device
from gpuaug.core.ragged import Ragged
from gpuaug.core.streams import current_stream
from gpuaug.fusion.ops.base import FrontOp
from gpuaug.fusion.program.plan import BasePass, OpPass

P = TypeVar("P", bound=BasePass)
T = TypeVar("T")

MOST_ARGUMENTS = 49
"""Largest number of arguments of a kernel, constants included.

Triton's launcher parses these arguments and 13 of its own with a table of 16 bytes per argument from malloc. For 1 KiB or more,
glibc first merges all freed small blocks, which takes 0.1 ms after a training step.
"""

_compiling: ContextVar[dict[Any, Callable[[], None]] | None] = ContextVar("_compiling", default=None)
"""Compilations that ``compiled_together`` runs at its end, by the form of the launch."""

_forms: set[Any] = set()
"""Forms of launches (kernel, device, constants, dtypes) that were compiled: Triton has them in its cache."""


class _Compiled(NamedTuple):
    """A compiled kernel on one device, as arguments of Triton's launcher.

    The arguments after the tensors are ``tail`` (default numbers and constants), or the numbers of a call and ``constants``.
    """

    launcher: Callable[..., None]
    function: int
    metadata: Any
    constants: tuple[Any, ...]
    tail: tuple[Any, ...]


class Launch:
    """Reusable launch of one kernel, for all tensors with the same dtypes, shapes and strides.

    At each launch, Triton determines from the value of every argument which compiled form of a kernel to run. The kernels of
    this package are specialised on their constants only, so that the form that the first launch compiles serves all launches.
    A launch calls Triton's launcher directly, with addresses in place of tensors: given tensors, the launcher queries the
    driver for each, and ``kernel[grid]`` prepares metadata for Triton's launch hooks (profilers).

    Args:
        kernel: A ``triton.jit`` function that takes tensors, then numbers, then constants: at most ``MOST_ARGUMENTS``.
        grid: Number of blocks along three axes.
        numbers: Integer arguments after the tensors, in the order of the kernel's signature.
        constants: The constants by name.
        warps: Warps in a block.
        fused: Whether a product and a sum may be one instruction that rounds once. With it, bytes are divided by 255 exactly.
        registers: Maximum number of registers per thread, to bound the registers of a block. Default: the compiler chooses.
    """

    __slots__ = ("_compiled", "_constants", "_grid", "_kernel", "_options", "_tail")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        numbers: Sequence[int],
        constants: dict[str, Any],
        *,
        warps: int = 4,
        fused: bool = True,
        registers: int | None = None,
    ) -> None:
        self._kernel = kernel
        self._grid = grid
        self._tail = tuple(numbers)
        self._constants = constants
        # Always passed, since the compiler's default differs between versions.
        self._options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": fused}
        if registers is not None:
            self._options["maxnreg"] = registers
        self._compiled: dict[int, _Compiled] = {}

    def __call__(
        self, tensors: Sequence[Tensor], grid: tuple[int, int, int] | None = None, numbers: Sequence[int] | None = None
    ) -> None:
        """Launch on the current stream of the current device, which the tensors are on.

        Args:
            tensors: In the order of the kernel's arguments.
            grid: Grid of this call, if it differs between batches, as for boxes. Default: the grid of the constructor.
            numbers: Integer arguments of this call. Default: those of the constructor.

        Cost:
            No synchronisation; the first launch of a form compiles it.
        """
        device = tensors[0].get_device()
        compiled = self._compiled.get(device)
        if compiled is not None:
            tail = compiled.tail if numbers is None else (*numbers, *compiled.constants)
            stream = current_stream(device)
            addresses = map(Tensor.data_ptr, tensors)
            # No data for hooks, and no hooks.
            compiled.launcher(
                *(grid or self._grid), stream, compiled.function, compiled.metadata, None, None, None, *addresses, *tail
            )
            return
        grid = grid or self._grid
        tail = self._tail if numbers is None else tuple(numbers)
        form = (self._kernel, device, *self._constants.values(), *(tensor.dtype for tensor in tensors))
        jobs = _compiling.get()
        if jobs is None:
            self._compile(form, self._kernel[grid], tensors, tail)
        elif form not in _forms and hasattr(self._kernel, "warmup"):  # not in Triton 3.4's interpreter
            jobs.setdefault(form, partial(self._compile, form, partial(self._kernel.warmup, grid=grid), tensors, tail))

    def _compile(self, form: Any, compiler: Callable[..., Any], tensors: Sequence[Tensor], numbers: Sequence[int]) -> None:
        with on_device(tensors[0].device):
            kernel = compiler(*tensors, *numbers, **self._constants, **self._options)
            if kernel is not None:  # the interpreter compiles nothing
                names = self._kernel.arg_names[len(tensors) + len(numbers) :]
                constants = tuple(self._constants[name] for name in names)
                # ``run`` is read first: reading it loads the kernel, which sets ``function``.
                compiled = _Compiled(kernel.run, kernel.function, kernel.packed_metadata, constants, (*self._tail, *constants))
                self._compiled[tensors[0].get_device()] = compiled
                _forms.add(form)


@contextmanager
def compiled_together() -> Iterator[None]:
    """Context manager in which launches of new forms do not run. Their kernels are compiled in parallel at its end.

    A nested context leaves its compilations to the outer context. Only the part of Triton's compiler that is written in Python,
    a fifth of its time, holds the interpreter lock.
    """
    if _compiling.get() is not None:
        yield
        return
    jobs: dict[Any, Callable[[], None]] = {}
    token = _compiling.set(jobs)
    try:
        yield
    finally:
        _compiling.reset(token)
    # Errors of the threads are ignored: the launch compiles the kernel again, and raises an error that persists. CPython until
    # 3.11.8 and 3.12.2 may fail to parse in several threads (https://github.com/python/cpython/issues/106905).
    with ThreadPoolExecutor() as threads:
        wait([threads.submit(job) for job in jobs.values()])


@triton.jit  # type: ignore[untyped-decorator]
def _empty_kernel() -> None:
    pass


def compile_and_run(launch: Callable[[], Any], other: Callable[[], Any] | None) -> None:
    """Compile and run ``launch``, and compile the kernels of ``other`` at the same time. Errors of ``other`` are suppressed."""
    # At the first compilation of a process, Triton takes 0.3 s to build a helper of its driver, and 0.3 s to hash its source
    # for the key of its cache. Threads that start together would each pay both.
    if hasattr(_empty_kernel, "warmup"):  # not in Triton 3.4's interpreter
        _empty_kernel.warmup(grid=(1,), enable_fp_fusion=True)
    with compiled_together():
        launch()
        if other is not None:
            with suppress(Exception):
                other()
    launch()


def prepared(pass_: P, source: Any, rows: Tensor, out: Tensor, make: Callable[[P, Any, Tensor, Tensor], T]) -> T:
    """Return ``make(pass_, source, rows, out)``, cached per pass by dtype, size and strides of the tensors.

    To make the launch of a crop, a flip and a jitter takes 16 µs of host time, to read it from the cache 1 µs (one core,
    2026-11-26).
    """
    key = make, source_key(source), out.dtype, out.shape, rows.stride(0), out.stride()
    value: T | None = pass_.prepared.get(key)
    if value is None:
        if len(pass_.prepared) >= 64:
            pass_.prepared.clear()
        value = pass_.prepared[key] = make(pass_, source, rows, out)
    return value


def read_constants(pass_: OpPass[FrontOp], source: Tensor) -> dict[str, Any]:
    """Return the constants of all kernels that read images of one size as the source of an op.

    ``SOURCE_W``: elements between neighbours along x. ``FRAMES``: images per row of the parameter table. ``SCALE``: whether
    pixels are bytes. ``CHANNELS``: number of channels.
    """
    return {
        "SOURCE_W": source.stride(3),
        "FRAMES": pass_.out.images_per_sample,
        "SCALE": source.dtype == torch.uint8,
        "CHANNELS": source.shape[1],
    }


def store_constants(pass_: OpPass[FrontOp], source: Tensor, out: Tensor) -> tuple[dict[str, Any], int]:
    """Return the constants of all kernels that read images of one size and store output pixels, and the planes of the grid.

    Constants of the output: ``OUT_W``: elements between neighbours along x. ``PROGRAM``, ``COUNT``: pointwise ops
    (``points.py``) and their number. ``RGB``: whether a block computes all three channels. The kernels of passes that can skip
    samples also take ``WAY``: column of the buffer route (``buffers`` in ``taps.py``), or -1.
    """
    # If the channels of a pixel are adjacent, a block of three planes stores whole pixels.
    channels = source.shape[1]
    rgb = channels == 3 and (out.stride(1) == 1 or any(op.rgb_only for op in pass_.points))
    constants = {"OUT_W": out.stride(3), "PROGRAM": pass_.program, "COUNT": len(pass_.program), "RGB": rgb}
    return read_constants(pass_, source) | constants, 1 if rgb else channels


def source_key(source: Tensor | Ragged) -> tuple[Any, ...]:
    """Return a hashable key of all properties of a source on which a launch depends, except its address."""
    if isinstance(source, Tensor):
        return source.dtype, source.shape[0], source.stride()
    shapes = source.shapes
    return source.data.dtype, len(source), shapes.channels, shapes.layout, shapes.windows is None, shapes.least > 1


def is_current(device: torch.device) -> bool:
    """Whether launches go to ``device``: Triton launches on the current device, regardless of the device of the tensors."""
    return device.index is None or device.index == current_device()  # the interpreter's device, a CPU, has no index


def on_device(device: torch.device) -> Any:
    """Return a context manager in which launches go to ``device``."""
    return nullcontext() if is_current(device) else torch.cuda.device(device)
