"""Running a frozen encoder from a CUDA graph: one launch in place of hundreds.

A graph replays fixed kernels on fixed addresses. So there is one for each *signature*: shapes, dtypes, strides,
switches of arithmetic and weight addresses, from which kernels and addresses follow. A batch is run from a graph if its
signature has occurred earlier in the same iterator, and eager otherwise. That depends on the sequence of batches alone, so a
batch takes the same form at every depth, and the odd last batch of an epoch runs eager.
"""

import gc
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpuaug.core import batch as batches
from gpuaug.core.streams import Lane

MOST_GRAPHS = 4
"""Graphs kept for each encoder and lane; the least recently used goes. Each holds the encoder's activations."""

Encode = Callable[..., Any]
Signature = tuple[Any, ...]


_COPIED_OUT = (torch.Tensor, int, float, str, type(None))


class CaptureError(Exception):
    """A capture failed. The generator that was current in it must not be drawn from again."""


class _Graph(NamedTuple):
    graph: Any
    inputs: tuple[torch.Tensor, ...]
    outputs: Any


class _Pool:
    """Device memory of one runner's graphs.

    PyTorch keeps a pool reserved after its last graph, and uses it for nothing else, until the cache is emptied. That waits for
    the device, so it is put off until the next pool is made.
    """

    left_any = False
    """Whether a pool was deleted since the cache was emptied."""

    def __init__(self) -> None:
        if _Pool.left_any:
            _Pool.left_any = False
            with suppress(RuntimeError):  # another thread may be capturing a graph of its own
                torch.cuda.synchronize()  # expandable segments wait for the stream that allocated, not for readers on others
                torch.cuda.empty_cache()
        self.handle = torch.cuda.graph_pool_handle()

    def __del__(self) -> None:
        _Pool.left_any = True


class GraphRunner:
    """Runs ``encode`` on one lane, eager or from graphs of its own.

    Args:
        encode: Called with the input tensors; no autograd graph is built in it.
        encoder: The module whose parameters and buffers ``encode`` reads.
        lane: Where it runs. Call ``run`` with this lane current.
        memory_format: The format in which static inputs are kept, if they have four dimensions.
    """

    def __init__(self, encode: Encode, encoder: nn.Module, lane: Lane, memory_format: torch.memory_format | None) -> None:
        self._encode = encode
        self._encoder = encoder
        self._lane = lane
        self._memory_format = memory_format
        self._pool: _Pool | None = None
        self._graphs: OrderedDict[Signature, _Graph] = OrderedDict()
        self._weights: list[torch.Tensor] = []
        self.reason = why_not_capturable(encoder)
        """Why batches run eager, or ``None`` if they can be captured."""
        self.refresh()

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, inputs: tuple[Any, ...], seen: set[Signature]) -> Any:
        """Queue the encoder's work on ``inputs``. The result belongs to the caller.

        Args:
            inputs: The encoder's arguments.
            seen: The signatures that have occurred in this iterator. This one's is added.

        Raises:
            CaptureError: If a capture failed. Nothing was queued.
        """
        if self.reason is not None or not all(type(value) is torch.Tensor and value.is_cuda for value in inputs):
            return self._encode(*inputs)
        signature = self._signature(inputs)
        if signature not in seen:
            seen.add(signature)
            return self._encode(*inputs) if signature in self._graphs else self._inspect(inputs)
        if signature not in self._graphs:
            self._make_room(MOST_GRAPHS - 1)
            self._graphs[signature] = self._capture(inputs)
        self._graphs.move_to_end(signature)
        graph, static, outputs = self._graphs[signature]
        for kept, value in zip(static, inputs, strict=True):
            kept.copy_(value)
        graph.replay()
        # The next replay writes the same addresses, and the user may keep a batch for ever.
        return batches.map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, outputs)

    def refresh(self) -> None:
        """Read the addresses of the encoder's weights. Drop the graphs if any has changed."""
        weights = [*self._encoder.parameters(), *self._encoder.buffers()]
        if [w.data_ptr() for w in weights] != [w.data_ptr() for w in self._weights]:
            self._make_room(0)
        self._weights = weights

    def _signature(self, inputs: tuple[torch.Tensor, ...]) -> Signature:
        forms = tuple((value.shape, value.dtype, value.stride()) for value in inputs)
        # Hundreds of addresses cost microseconds to look at, against the milliseconds of launches that are saved.
        return (forms, _math_state(), tuple(weight.data_ptr() for weight in self._weights))

    def _make_room(self, most: int) -> None:
        if len(self._graphs) > most:
            self._lane.record_event().synchronize()  # a graph in flight must not be destroyed
            while len(self._graphs) > most:
                self._graphs.popitem(last=False)
        if not self._graphs:
            self._pool = None  # PyTorch gives a pool up with its last graph

    def _inspect(self, inputs: tuple[torch.Tensor, ...]) -> Any:
        """Run eager, which also warms up libraries and caches, and look for operations that a capture would fail on.

        A failed capture leaves its changes behind, so reasons to fail are looked for before.
        """
        with _host_waits() as waits, _DeviceCrossings() as crossings:
            outputs = self._encode(*inputs)
        if waits:
            self.reason = f"its forward makes the host wait for the device ({waits[0]})"
        elif crossings.found is not None:
            self.reason = f"its forward copies a tensor {crossings.found}"
        for leaf in batches.leaves(outputs):
            if not isinstance(leaf, _COPIED_OUT):
                self.reason = f"it returns a {type(leaf).__name__}, whose tensors cannot be copied out of a graph"
        return outputs

    def _capture(self, inputs: tuple[torch.Tensor, ...]) -> _Graph:
        static = tuple(self._static_like(value) for value in inputs)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = _Pool()
        # A collection within the capture could destroy graphs and events of others, which is not allowed then.
        collecting = gc.isenabled()
        try:
            gc.disable()
            try:
                # thread_local: page-locked allocations in the loader's pin thread must not invalidate the capture.
                graph.capture_begin(pool=self._pool.handle, capture_error_mode="thread_local")
                outputs = self._encode(*static)
                self._end(graph)
            except BaseException:  # an interrupt, too: no other work may run on a stream that captures
                self._abandon(graph)
                raise
        except Exception as error:
            self.reason = f"its capture failed: {error}"
            raise CaptureError(self.reason) from error
        finally:
            if collecting:
                gc.enable()
        return _Graph(graph, static, outputs)

    def _static_like(self, value: torch.Tensor) -> torch.Tensor:
        if self._memory_format is not None and value.ndim == 4:
            return torch.empty_like(value, memory_format=self._memory_format)
        return torch.empty_like(value)

    def _end(self, graph: Any) -> None:
        try:
            graph.capture_end()
        except BaseException:
            self._release_pool()
            raise

    def _abandon(self, graph: Any) -> None:
        with suppress(RuntimeError):
            self._end(graph)

    def _release_pool(self) -> None:
        """Clean up after a ``capture_end`` that throws, which leaves the allocator in capture mode.

        It would put off reuse of every block that ``record_stream`` was called on, for the rest of the process.
        """
        if self._pool is None:
            return
        device = torch.cuda.current_device()
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(device, self._pool.handle)
            torch._C._cuda_releasePool(device, self._pool.handle)
        self._pool = None


def why_not_capturable(encoder: nn.Module) -> str | None:
    """The reason why ``encoder`` cannot be captured, as far as it shows without a run; else ``None``."""
    dynamo: Any = sys.modules.get("torch._dynamo")  # importing it takes a second, and torch.compile has done so
    for name, module in encoder.named_modules():
        compiled = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
        if compiled or getattr(module, "_compiled_call_impl", None) is not None:
            return "it is compiled, and may be running from graphs of its own"
        if module._forward_hooks or module._forward_pre_hooks:
            return f"it has forward hooks (on {name or 'the encoder itself'}), which a replay would not call"
    return None


@contextmanager
def _host_waits() -> Iterator[list[str]]:
    """Collect the warnings of PyTorch's sync debug mode in the block. Other warnings are passed on."""
    found: list[str] = []
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if mode == 0:  # a user who set one of the other modes wants what it does
                torch.cuda.set_sync_debug_mode("warn")
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    for warning in caught:
        if "synchronizing CUDA operation" in str(warning.message):
            found.append(f"{warning.filename}:{warning.lineno}")
        elif "Synchronization debug mode is a prototype" not in str(warning.message):  # said once of the mode itself
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


class _DeviceCrossings(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices copies between the host and the device, which sync debug mode misses when they are asynchronous."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in {"aten::_to_copy", "aten::copy_"} and isinstance(result, torch.Tensor):
            source = args[-1] if func._schema.name == "aten::_to_copy" else args[1]
            if isinstance(source, torch.Tensor) and source.device != result.device:
                self.found = self.found or f"from {source.device} to {result.device}"
        return result


def _math_state() -> tuple[Any, ...]:
    """Global switches of torch that decide which kernels run."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return (
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.is_inference_mode_enabled(),
        *_float32_precision(),
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
    )


def _float32_precision() -> tuple[Any, ...]:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    if hasattr(cudnn, "conv"):  # PyTorch 2.9 on; the older switches raise once the newer have been used
        return cuda.matmul.fp32_precision, cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    return cuda.matmul.allow_tf32, cudnn.allow_tf32
