"""Launches of Triton kernels with little host time, and constants that are common to several kernels.

A *pass* is one reading and writing of all images. It begins with its *front*: an op with a kernel of its own, such as a blur
(``OpPass``), or a gather of ops that move pixels. A *row* is a sample's row of the parameter table. Triton compiles one *form*
of a kernel per set of constants and dtypes of tensors.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from inspect import signature
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpuaug.core.ragged import Ragged
from gpuaug.core.streams import current_device, current_stream
from gpuaug.fusion.ops.base import FrontOp
from gpuaug.fusion.program.plan import BasePass, OpPass

P = TypeVar("P", bound=BasePass)
T = TypeVar("T")

MOST_ARGUMENTS = 49
"""Maximum number of arguments of a kernel, constants included.

Triton's launcher adds 13 arguments, and allocates 16 bytes per argument with malloc to parse them: 992 bytes for 49 arguments.
For 1 KiB or more, glibc first merges all freed small blocks, which takes 0.1 ms after a training step.
"""

_pending: ContextVar[dict[Any, Callable[[], None]] | None] = ContextVar("_pending", default=None)
"""Compilations that ``compile_in_parallel`` runs at its end, by form; ``None`` outside of ``compile_in_parallel``."""

_loading_launcher = Lock()
"""Held while Triton loads the launcher of a kernel, a C module.

Triton 3.4 to 3.6 give all launchers the same module name. CPython returns one module object for all repeated loads of C modules
of this name, and puts the functions of the latest load into it. Without the lock, a thread may read the launcher of a kernel
that another thread loads at the same time, and launch with the wrong number or types of arguments.
"""

_compiled_forms: set[Any] = set()
"""Forms that are compiled already, as (kernel, device, constants, dtypes)."""


def kernel(function: Callable[..., Any], name: Callable[[Any], str] | None = None) -> Any:
    """Return a kernel that is compiled once per set of constants and dtypes, not per value of an integer or alignment.

    Arguments that are constants have the annotation ``tl.constexpr``. ``name``: function that returns the name of a form in
    profilers, from an object with the attribute ``constants``. Default: the name of ``function``.
    """
    variables = [argument for argument, value in signature(function).parameters.items() if value.annotation is not tl.constexpr]
    return triton.jit(function, repr=name, do_not_specialize=variables, do_not_specialize_on_alignment=variables)


class _CompiledKernel(NamedTuple):
    """A compiled kernel on one device: Triton's launcher and its arguments."""

    launcher: Callable[..., None]
    function: int
    """Handle of the kernel in the CUDA driver."""
    metadata: Any
    """Properties of the kernel, such as its number of warps, in the format of the launcher."""
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
        options: Options of Triton's compiler. ``num_warps``: warps in a block, 4 by default. ``enable_fp_fusion``: ``False`` if
            products must be rounded before they are added. ``maxnreg``: maximum number of registers per thread.
    """

    __slots__ = ("_compiled", "_constants", "_grid", "_integers", "_kernel", "_options")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        integers: Sequence[int],
        constants: dict[str, Any],
        **options: Any,
    ) -> None:
        self._kernel = kernel
        self._grid = grid
        self._integers = tuple(integers)
        self._constants = constants
        # enable_fp_fusion is always passed, because the compiler's default differs between versions.
        self._options = {"num_warps": 4, "enable_fp_fusion": True, **options}
        self._compiled: dict[int, _CompiledKernel] = {}

    def __call__(
        self, tensors: Sequence[Tensor], grid: tuple[int, int, int] | None = None, integers: Sequence[int] | None = None
    ) -> None:
        """Launch on the current stream of the current device, which the tensors are on.

        Args:
            tensors: In the order of the kernel's arguments.
            grid: Grid of this call, for a kernel whose grid differs between batches. Default: the grid of the constructor.
            integers: Integer arguments of this call. Default: the integers of the constructor.

        Cost:
            No synchronisation. The first launch of a form compiles the kernel.
        """
        device = tensors[0].get_device()
        compiled = self._compiled.get(device)
        if compiled is None:
            call_integers = self._integers if integers is None else tuple(integers)
            form = (self._kernel, device, *self._constants.values(), *(tensor.dtype for tensor in tensors))
            compilations = _pending.get()
            if compilations is not None:  # within ``compile_in_parallel``: nothing is launched
                # If another ``Launch`` has compiled the form, the next call of this ``Launch`` gets it from Triton's cache.
                if form not in _compiled_forms:
                    compilations.setdefault(form, partial(self._compile, form, tensors, call_integers))
                return
            self._compile(form, tensors, call_integers)
            compiled = self._compiled.get(device)
            if compiled is None:  # Triton's interpreter compiles nothing
                self._kernel[grid or self._grid](*tensors, *call_integers, **self._constants, **self._options)
                return
        arguments = compiled.arguments if integers is None else (*integers, *compiled.constants)
        stream = current_stream(device)
        addresses = map(Tensor.data_ptr, tensors)
        # The three None are metadata for launch hooks, the hook before the launch, and the hook after it.
        compiled.launcher(
            *(grid or self._grid), stream, compiled.function, compiled.metadata, None, None, None, *addresses, *arguments
        )

    def _compile(self, form: Any, tensors: Sequence[Tensor], integers: Sequence[int]) -> None:
        """Compile ``form`` for tensors and integers of a call, without a launch, and keep the compiled kernel."""
        if not hasattr(self._kernel, "warmup"):  # Triton 3.4's interpreter has none
            return
        with on_device(tensors[0].device):
            kernel = self._kernel.warmup(*tensors, *integers, grid=self._grid, **self._constants, **self._options)
            if kernel is None:  # Triton's interpreter compiles nothing
                return
            constant_names = self._kernel.arg_names[len(tensors) + len(integers) :]
            constants = tuple(self._constants[name] for name in constant_names)
            with _loading_launcher:
                launcher = kernel.run  # reading ``run`` loads the kernel, which sets ``kernel.function``
            compiled = _CompiledKernel(
                launcher, kernel.function, kernel.packed_metadata, constants, (*self._integers, *constants)
            )
            self._compiled[tensors[0].get_device()] = compiled
            _compiled_forms.add(form)


@functools.cache
def launch_for(kernel: Any, dtypes: tuple[torch.dtype, ...], constants: tuple[Any, ...], **options: Any) -> Launch:
    """Return the launch of a kernel whose grid and integers are passed at each call.

    Args:
        kernel: See ``Launch``.
        dtypes: Dtypes of the tensors whose dtype differs between calls. Used only as a key: each combination has a ``Launch``.
        constants: The constants, in the order of the kernel's signature, which ends with them.
        options: See ``Launch``.
    """
    constant_names = kernel.arg_names[-len(constants) :]
    return Launch(kernel, (1, 1, 1), (), dict(zip(constant_names, constants, strict=True)), **options)


class FirstLaunch(NamedTuple):
    """First of the two launches of a filter. It writes a tensor, the *intermediate*, which the second launch reads."""

    launch: Launch
    shape: tuple[int, ...]
    """Shape of the intermediate, (B, C, …)."""
    dtype: torch.dtype
    """Dtype of the intermediate."""


class FilterLaunch(NamedTuple):
    """One or two launches of a filter."""

    first: FirstLaunch | None
    """First of two launches; ``None`` if the filter runs in one launch."""
    last: Launch
    """Launch that reads the source, and the intermediate if there is one, and writes the output."""

    def __call__(self, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
        """Launch on the current stream. ``tensors``: (source, output, parameter table)."""
        source, out, param_table = tensors
        intermediate = param_table  # stands in for the intermediate, which is not read without a first launch
        if self.first is not None:
            intermediate = torch.empty(self.first.shape, dtype=self.first.dtype, device=source.device)
            self.first.launch((source, intermediate, param_table))
        self.last((source, intermediate, out, param_table))


@contextmanager
def compile_in_parallel() -> Iterator[None]:
    """Return a context manager in which a ``Launch`` that is not compiled yet compiles its kernel instead of launching it.

    The compilations run at the end of the context, each form once, in parallel threads, which hold Python's interpreter lock
    during a fifth of the compile time only. A ``Launch`` that is compiled already launches its kernel. A nested context leaves
    its compilations to the outer context.
    """
    if _pending.get() is not None:
        yield
        return
    compilations: dict[Any, Callable[[], None]] = {}
    token = _pending.set(compilations)
    try:
        yield
    finally:
        _pending.reset(token)
    # Errors of the threads are ignored: the next call of the ``Launch`` compiles again, and raises the error if it persists.
    # CPython until 3.11.8 and 3.12.2 may fail to parse Python code in several threads at once
    # (https://github.com/python/cpython/issues/106905).
    with ThreadPoolExecutor() as threads:
        wait([threads.submit(compilation) for compilation in compilations.values()])


@triton.jit  # type: ignore[untyped-decorator]
def _empty_kernel() -> None:
    pass


def compile_and_run(launch: Callable[[], Any], other_launches: Callable[[], Any] | None) -> None:
    """Compile and launch a kernel, and compile further kernels at the same time in other threads.

    Args:
        launch: Function that launches the kernel. It is called twice: the first call only compiles, unless the kernel is
            compiled already.
        other_launches: Function that launches further kernels. A kernel that is not compiled yet is compiled, and does not run.
            Errors are suppressed.
    """
    # At the first compilation of a process, Triton builds a C module for its driver, which takes 0.3 s, and hashes its own
    # source for the keys of its cache, which takes 0.3 s. If several threads began with a compilation, each would do both, so
    # an empty kernel is compiled before them.
    if hasattr(_empty_kernel, "warmup"):  # Triton 3.4's interpreter has none
        _empty_kernel.warmup(grid=(1,), enable_fp_fusion=True)
    with compile_in_parallel():
        launch()
        if other_launches is not None:
            with suppress(Exception):
                other_launches()
    launch()


def cached_launch(pass_: P, source: Any, param_table: Tensor, out: Tensor, make: Callable[[P, Any, Tensor, Tensor], T]) -> T:
    """Return the launches ``make(pass_, source, param_table, out)``, cached per pass by dtype, size and strides of the tensors.

    For a crop, a flip and a jitter, ``make`` takes 16 µs of host time, and a cache hit 1 µs (one core, 2026-11-26).

    Args:
        pass_: Pass that the launches run.
        source: Images that the pass reads: a tensor, or images of different sizes.
        param_table: Columns of the parameter table from the pass's first column on, (B, K).
        out: Output images of the pass.
        make: Function that prepares the launches.
    """
    key = make, source_key(source), out.dtype, out.shape, param_table.stride(0), out.stride()
    launches: T | None = pass_.launch_cache.get(key)
    if launches is None:
        if len(pass_.launch_cache) >= 64:  # bounds the memory if every batch has another size
            pass_.launch_cache.clear()
        launches = pass_.launch_cache[key] = make(pass_, source, param_table, out)
    return launches


def source_constants(pass_: OpPass[FrontOp], source: Tensor) -> dict[str, Any]:
    """Return the constants of kernels that read images of one size.

    ``SOURCE_W``: stride of the source along x, in elements. ``FRAMES``: frames per clip, which share a row of the
    parameter table; 1 for images. ``BYTES``: whether pixels are uint8. ``CHANNELS``: number of channels. ``ROUTE_COLUMN``:
    column of the buffer route, from which of two buffers a sample is read; -1 without (``BasePass.route_column``).
    """
    return {
        "SOURCE_W": source.stride(3),
        "FRAMES": pass_.out.images_per_sample,
        "BYTES": source.dtype == torch.uint8,
        "CHANNELS": source.shape[1],
        "ROUTE_COLUMN": pass_.route_column,
    }


def output_constants(pass_: OpPass[FrontOp], source: Tensor, out: Tensor) -> tuple[dict[str, Any], int]:
    """Return the constants of kernels that read images of one size and store output pixels, and the grid's size along channels.

    The constants are the result of ``source_constants``, and four others. ``OUT_W``: stride of the output along x, in elements.
    ``PROGRAM``, ``OP_COUNT``: pointwise ops (``points.py``) and their number. ``RGB``: whether a block computes the three
    channels of its pixels; otherwise it computes one channel, and the grid has one index per channel.
    """
    # A block computes three channels if an op needs them at once, or if they are adjacent in memory, to store whole pixels.
    channels = source.shape[1]
    rgb = channels == 3 and (out.stride(1) == 1 or any(op.rgb_only for op in pass_.point_ops))
    constants = {"OUT_W": out.stride(3), "PROGRAM": pass_.point_program, "OP_COUNT": len(pass_.point_program), "RGB": rgb}
    return source_constants(pass_, source) | constants, 1 if rgb else channels


def source_key(source: Tensor | Ragged) -> tuple[Any, ...]:
    """Return a hashable key of all properties of a source on which a launch depends, except its address."""
    if isinstance(source, Tensor):
        return source.dtype, source.shape[0], source.stride()
    shapes = source.shapes
    # The constant ``ADJACENT_TAPS`` of ``gather_kernel`` depends on the shortest side: it reads two neighbours per axis.
    return source.data.dtype, len(source), shapes.channels, shapes.layout, shapes.windows is None, shapes.shortest_side > 1


def is_current(device: torch.device) -> bool:
    """Return whether launches go to ``device``: Triton launches on the current device, whatever the device of the tensors."""
    return device.index is None or device.index == current_device()  # the interpreter's device, a CPU, has no index


def on_device(device: torch.device) -> Any:
    """Return a context manager in which launches go to ``device``."""
    return nullcontext() if is_current(device) else torch.cuda.device(device)
