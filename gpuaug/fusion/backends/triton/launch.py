"""Launches of Triton kernels that take little host time, and constants that several kernels have.

A pass is one reading and writing of all images. Its *front* is its first op, if that op is not pointwise and has a separate
kernel. Triton compiles one *form* of a kernel for each set of constants and dtypes of tensors.
"""

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
"""Maximum number of arguments of a kernel, constants included.

To parse these arguments and 13 more, Triton's launcher allocates 16 bytes per argument with malloc. If a request has 1 KiB or
more, glibc first merges all freed small blocks, which takes 0.1 ms after a training step.
"""

_pending: ContextVar[dict[Any, Callable[[], None]] | None] = ContextVar("_pending", default=None)
"""Compilations that ``compile_in_parallel`` runs at its end, by form; ``None`` outside of ``compile_in_parallel``."""

_compiled_forms: set[Any] = set()
"""Forms that are compiled already, as (kernel, device, constants, dtypes)."""


class _CompiledKernel(NamedTuple):
    """A compiled kernel on one device: Triton's launcher and its arguments."""

    launcher: Callable[..., None]
    function: int
    metadata: Any
    constants: tuple[Any, ...]
    """Constants, in the order of the kernel's signature."""
    arguments: tuple[Any, ...]
    """Default arguments after the tensors: the integers of the launch, and the constants."""


class Launch:
    """Reusable launch of one kernel, for all tensors with the same dtypes, shapes and strides.

    At each call of ``kernel[grid]``, Triton determines from the value of every argument which form of the kernel to run, and
    prepares metadata for launch hooks (profilers). The kernels of this package are specialised on their constants only, so the
    form that the first launch compiles serves all launches. Later launches call Triton's launcher directly, with addresses in
    place of tensors, because for a tensor the launcher queries the driver.

    Args:
        kernel: A ``triton.jit`` function of tensors, then integers, then constants; at most ``MOST_ARGUMENTS`` in all.
        grid: Number of blocks along three axes.
        integers: Integer arguments after the tensors, in the order of the kernel's signature.
        constants: The constants by name.
        warps: Warps in a block.
        fp_fusion: Whether a product and a sum may be one instruction that rounds once. ``byte_share`` relies on this.
        registers: Maximum number of registers per thread, to bound the registers of a block. Default: the compiler chooses.
    """

    __slots__ = ("_compiled", "_constants", "_grid", "_integers", "_kernel", "_options")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        integers: Sequence[int],
        constants: dict[str, Any],
        *,
        warps: int = 4,
        fp_fusion: bool = True,
        registers: int | None = None,
    ) -> None:
        self._kernel = kernel
        self._grid = grid
        self._integers = tuple(integers)
        self._constants = constants
        # Both are always passed, because the compiler's default of enable_fp_fusion differs between versions.
        self._options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": fp_fusion}
        if registers is not None:
            self._options["maxnreg"] = registers
        self._compiled: dict[int, _CompiledKernel] = {}

    def __call__(
        self, tensors: Sequence[Tensor], grid: tuple[int, int, int] | None = None, integers: Sequence[int] | None = None
    ) -> None:
        """Launch on the current stream of the current device, which the tensors are on.

        Args:
            tensors: In the order of the kernel's arguments.
            grid: Grid of this call, if it differs between batches, as for boxes. Default: the grid of the constructor.
            integers: Integer arguments of this call. Default: the integers of the constructor.

        Cost:
            No synchronisation. The first launch of a form compiles the kernel.
        """
        device = tensors[0].get_device()
        compiled = self._compiled.get(device)
        if compiled is not None:
            arguments = compiled.arguments if integers is None else (*integers, *compiled.constants)
            stream = current_stream(device)
            addresses = map(Tensor.data_ptr, tensors)
            # Three times None: metadata for hooks, hook before the launch, hook after it.
            compiled.launcher(
                *(grid or self._grid), stream, compiled.function, compiled.metadata, None, None, None, *addresses, *arguments
            )
            return
        grid = grid or self._grid
        arguments = self._integers if integers is None else tuple(integers)
        form = (self._kernel, device, *self._constants.values(), *(tensor.dtype for tensor in tensors))
        jobs = _pending.get()
        if jobs is None:
            self._compile(form, self._kernel[grid], tensors, arguments)
        elif form not in _compiled_forms and hasattr(self._kernel, "warmup"):  # not in Triton 3.4's interpreter
            jobs.setdefault(form, partial(self._compile, form, partial(self._kernel.warmup, grid=grid), tensors, arguments))

    def _compile(self, form: Any, compiler: Callable[..., Any], tensors: Sequence[Tensor], integers: Sequence[int]) -> None:
        """Compile a form. ``compiler``: ``kernel[grid]``, which also launches, or ``kernel.warmup``, which does not."""
        with on_device(tensors[0].device):
            kernel = compiler(*tensors, *integers, **self._constants, **self._options)
            if kernel is not None:  # the interpreter compiles nothing
                names = self._kernel.arg_names[len(tensors) + len(integers) :]
                constants = tuple(self._constants[name] for name in names)
                # ``run`` is read before ``function``, because this loads the kernel, which sets ``function``.
                compiled = _CompiledKernel(
                    kernel.run, kernel.function, kernel.packed_metadata, constants, (*self._integers, *constants)
                )
                self._compiled[tensors[0].get_device()] = compiled
                _compiled_forms.add(form)


@contextmanager
def compile_in_parallel() -> Iterator[None]:
    """Return a context manager in which launches of new forms do not run, and at whose end their kernels are compiled.

    Threads compile the kernels in parallel: four fifths of the compile time do not hold the interpreter lock. A nested context
    leaves its compilations to the outer context.
    """
    if _pending.get() is not None:
        yield
        return
    jobs: dict[Any, Callable[[], None]] = {}
    token = _pending.set(jobs)
    try:
        yield
    finally:
        _pending.reset(token)
    # Errors of the threads are ignored: the launch compiles the kernel again, and raises an error that persists. CPython until
    # 3.11.8 and 3.12.2 may fail to parse in several threads (https://github.com/python/cpython/issues/106905).
    with ThreadPoolExecutor() as threads:
        wait([threads.submit(job) for job in jobs.values()])


@triton.jit  # type: ignore[untyped-decorator]
def _empty_kernel() -> None:
    pass


def compile_and_run(launch: Callable[[], Any], other: Callable[[], Any] | None) -> None:
    """Call ``launch``, and compile the kernels of ``other`` at the same time. Errors of ``other`` are suppressed."""
    # At the first compilation of a process, Triton takes 0.3 s to build a helper of its driver, and 0.3 s to hash its source
    # for the key of its cache. Threads that start together would each pay both.
    if hasattr(_empty_kernel, "warmup"):  # not in Triton 3.4's interpreter
        _empty_kernel.warmup(grid=(1,), enable_fp_fusion=True)
    with compile_in_parallel():
        launch()
        if other is not None:
            with suppress(Exception):
                other()
    launch()


def cached_launch(pass_: P, source: Any, rows: Tensor, out: Tensor, make: Callable[[P, Any, Tensor, Tensor], T]) -> T:
    """Return the launches ``make(pass_, source, rows, out)``, cached per pass by dtype, size and strides of the tensors.

    For a crop, a flip and a jitter, ``make`` takes 16 µs of host time, and the cache 1 µs (one core, 2026-11-26).
    """
    key = make, source_key(source), out.dtype, out.shape, rows.stride(0), out.stride()
    value: T | None = pass_.launch_cache.get(key)
    if value is None:
        if len(pass_.launch_cache) >= 64:
            pass_.launch_cache.clear()
        value = pass_.launch_cache[key] = make(pass_, source, rows, out)
    return value


def source_constants(pass_: OpPass[FrontOp], source: Tensor) -> dict[str, Any]:
    """Return the constants of kernels that read images of one size.

    ``SOURCE_W``: stride of the source along x, in elements. ``FRAMES``: images per row of the parameter table, the frames of a
    clip. ``BYTES``: whether pixels are bytes. ``CHANNELS``: number of channels.
    """
    return {
        "SOURCE_W": source.stride(3),
        "FRAMES": pass_.out.images_per_sample,
        "BYTES": source.dtype == torch.uint8,
        "CHANNELS": source.shape[1],
    }


def output_constants(pass_: OpPass[FrontOp], source: Tensor, out: Tensor) -> tuple[dict[str, Any], int]:
    """Return the constants of kernels that read images of one size and store output pixels, and the planes of the grid.

    In addition to ``source_constants``: ``OUT_W``: stride of the output along x, in elements. ``PROGRAM``, ``OP_COUNT``:
    pointwise ops (``points.py``) and their number. ``RGB``: whether a block computes all three channels. The kernels of passes
    that can skip samples also take ``ROUTE_COLUMN``: column of the buffer route (``select_buffers`` in ``taps.py``), or -1.
    """
    # If the channels of a pixel are adjacent, a block of three planes stores whole pixels.
    channels = source.shape[1]
    rgb = channels == 3 and (out.stride(1) == 1 or any(op.rgb_only for op in pass_.point_ops))
    constants = {"OUT_W": out.stride(3), "PROGRAM": pass_.point_program, "OP_COUNT": len(pass_.point_program), "RGB": rgb}
    return source_constants(pass_, source) | constants, 1 if rgb else channels


def source_key(source: Tensor | Ragged) -> tuple[Any, ...]:
    """Return a hashable key of all properties of a source on which a launch depends, except its address."""
    if isinstance(source, Tensor):
        return source.dtype, source.shape[0], source.stride()
    shapes = source.shapes
    return source.data.dtype, len(source), shapes.channels, shapes.layout, shapes.windows is None, shapes.shortest_side > 1


def is_current(device: torch.device) -> bool:
    """Return whether launches go to ``device``: Triton launches on the current device, whatever the device of the tensors."""
    return device.index is None or device.index == current_device()  # the interpreter's device, a CPU, has no index


def on_device(device: torch.device) -> Any:
    """Return a context manager in which launches go to ``device``."""
    return nullcontext() if is_current(device) else torch.cuda.device(device)
