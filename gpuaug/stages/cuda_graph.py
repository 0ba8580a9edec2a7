"""Running a frozen encoder from a CUDA graph: one launch in place of hundreds.

A graph replays fixed kernels on fixed addresses. So there is one for each *signature*: shapes, dtypes, strides,
switches of arithmetic and weight addresses, from which kernels and addresses follow. A batch is run from a graph if its
signature has signatures earlier in the same iterator and there is room for its graph, and eager otherwise. That depends on the
sequence of batches alone, so a batch takes the same form at every depth. The odd last batch of an epoch runs eager.
"""

import gc
import random
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as _global_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from gpuaug.core import batch as batches
from gpuaug.core.streams import Lane
from gpuaug.stages.encoders import EncoderCall, tables
from gpuaug.stages.graph_memory import (
    MOST_GRAPHS,
    MOST_SIGNATURES,
    Need,
    PeakAllocation,
    Pool,
    Signature,
    Signatures,
    held_bytes,
    total_bytes,
)

_COPIED_OUT = (torch.Tensor, int, float, str, type(None), torch.dtype, torch.device)
_CONSTANTS = (int, float, bool, str, type(None))
"""Types of inputs that are part of a signature."""


_PARTS_OF_FORWARD = ("torch.nn.utils.", "transformers.utils.output_capturing")
"""Modules whose forward hooks only compute or note tensors: weight norms, and hidden states that were asked for."""


class CaptureError(Exception):
    """A capture failed. The generator that was current in it must not be drawn from again."""


class _Graph(NamedTuple):
    graph: Any
    inputs: tuple[Any, ...]
    outputs: Any
    need: Need
    tables: list[torch.Tensor]
    """Tensors that modules keep in plain attributes, such as positions of a length. Another batch may replace them."""


class GraphRunner:
    """Runs ``encode`` on one lane, eager or from graphs of its own.

    Args:
        encode: Called with the inputs; no autograd graph is built in it.
        lane: Where it runs. Call ``run`` with this lane current.
        memory_format: The format in which static inputs are kept, if they have four dimensions.
        most_bytes: Bytes of device memory for its graphs.
    """

    def __init__(self, encode: EncoderCall, lane: Lane, memory_format: torch.memory_format | None, most_bytes: int) -> None:
        self._encode = encode
        self._lane = lane
        self._memory_format = memory_format
        self.most_bytes = most_bytes
        self._pool: Pool | None = None
        self._graphs: OrderedDict[Signature, _Graph] = OrderedDict()
        self._needs: dict[Signature, Need] = {}
        self._weights: list[torch.Tensor] = []
        self._addresses: tuple[int, ...] = ()
        self.captured = 0
        """Graphs captured so far."""
        self.replayed = 0
        """Runs from a graph so far."""
        self.num_bytes = 0
        """Bytes on the device of the graphs' pool and inputs."""
        self.without_room: Need | None = None
        """Need of the last signature that repeated and had no room."""
        self.reason = why_not_capturable(encode.module)
        """Why batches run eager, or ``None`` if they can be captured."""
        self.refresh()

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, inputs: tuple[Any, ...], signatures: Signatures) -> Any:
        """Queue the encoder's work on ``inputs``. The result belongs to the caller.

        Args:
            inputs: The encoder's arguments.
            signatures: The signatures that have signatures in this iterator. This one's is added.

        Raises:
            CaptureError: If a capture failed. Nothing was queued.
        """
        signature = self._signature(inputs) if self.reason is None else None
        if signature is None:
            return self._encode.run_eagerly(*inputs)
        if signature not in signatures.needs:
            if len(signatures.needs) == MOST_SIGNATURES:
                return self._encode.run_eagerly(*inputs)
            if signature in self._needs:
                self.reason = why_not_capturable(self._encode.module)  # hooks may have come since the last iterator
                result = self._encode.run_eagerly(*inputs)
            else:
                result = self._inspect(inputs, signature)
            signatures.needs[signature] = self._needs[signature]
            return result
        if not signatures.has_room(signature, self.most_bytes):
            self.without_room = signatures.needs[signature]
            return self._encode.run_eagerly(*inputs)
        if signature not in self._graphs:
            self._add(signature, inputs, signatures.needs[signature])
        self._graphs.move_to_end(signature)
        graph, static, outputs, *_ = self._graphs[signature]
        with torch.no_grad():  # or an input that requires grad would tie the copies of all batches together
            for kept, value in zip(static, inputs, strict=True):
                if isinstance(kept, torch.Tensor):
                    kept.copy_(value)
        graph.replay()
        self.replayed += 1

        def copied(leaf: Any) -> Any:
            return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf

        # The next replay writes the same addresses, and the user may keep a batch for ever.
        return batches.map_leaves(batches.cached_by_id(copied), outputs)

    def capture(self, inputs: tuple[Any, ...]) -> None:
        """Capture a graph for inputs like these, unless there is one, or it cannot be, or there is no room for it.

        Raises:
            CaptureError: If a capture failed.
        """
        signature = self._signature(inputs) if self.reason is None else None
        if signature is None or signature in self._graphs:
            return
        if signature not in self._needs:
            self._inspect(inputs, signature)
        need = self._needs[signature]
        fits = total_bytes([need, *(graph.need for graph in self._graphs.values())]) <= self.most_bytes
        if not fits:
            self.without_room = need
        elif self.reason is None and len(self._graphs) < MOST_GRAPHS:
            self._add(signature, inputs, need)

    def refresh(self) -> None:
        """Read the addresses of the encoder's weights. Drop the graphs if any has changed."""
        module = self._encode.module
        self._weights = [*module.parameters(), *module.buffers()]
        addresses = tuple(weight.data_ptr() for weight in self._weights)
        if addresses != self._addresses:  # a weight may be the same tensor with other storage
            self._drop()
            self._needs.clear()
        self._addresses = addresses

    def _signature(self, inputs: tuple[Any, ...]) -> Signature | None:
        """What decides the kernels and addresses of a run, or ``None`` if these inputs cannot be a graph's."""
        forms: list[Any] = []
        for value in inputs:
            if _is_on_card(value):
                forms.append((value.shape, value.dtype, value.stride()))
            elif type(value) in _CONSTANTS:
                forms.append((type(value), value))
            else:
                return None
        # Hundreds of addresses cost microseconds to look at, against the milliseconds of launches that are saved.
        addresses = tuple(weight.data_ptr() for weight in self._weights)
        if addresses != self._addresses:
            self._addresses = addresses  # one tuple for all signatures
        return (tuple(forms), _math_state(), self._addresses)

    def _add(self, signature: Signature, inputs: tuple[Any, ...], need: Need) -> None:
        """Capture a graph, in place of the least recently used ones if there is no room beside them."""
        kept = [graph.need for graph in self._graphs.values()]
        surplus = 0
        while surplus < len(kept) and (
            total_bytes([need, *kept[surplus:]]) > self.most_bytes or len(kept) - surplus >= MOST_GRAPHS
        ):
            surplus += 1
        if surplus:
            self._lane.record_event().synchronize()  # a graph in flight must not be destroyed
            for _ in range(surplus):
                self._graphs.popitem(last=False)
            self._measure()
            if not self._graphs or self.num_bytes > self.most_bytes:  # a pool does not shrink, and its parts may fit nothing
                self._drop()
        self._graphs[signature] = self._capture(inputs, need)
        self.captured += 1
        self._measure()

    def _measure(self) -> None:
        static = (value for graph in self._graphs.values() for value in graph.inputs if isinstance(value, torch.Tensor))
        self.num_bytes = sum(value.nbytes for value in static) + (self._pool.num_bytes if self._pool is not None else 0)

    def _drop(self) -> None:
        if self._graphs:
            self._lane.record_event().synchronize()  # a graph in flight must not be destroyed
            self._graphs.clear()
        self._pool = None  # PyTorch gives a pool up with its last graph
        self.num_bytes = 0

    def _inspect(self, inputs: tuple[Any, ...], signature: Signature) -> Any:
        """Run eager, which also warms up libraries and caches, and look for operations that a capture would fail on.

        A failed capture leaves its changes behind, so reasons to fail are looked for before. Notes the graph's need.
        """
        outputs = self._look(inputs, signature)
        if self.reason is not None:
            # transformers reads a mask on the host to choose a kernel, but not in a capture. Eager batches are as if this were
            # not there, so what this run gives is not used.
            self.reason = None
            with _as_in_a_capture():
                self._look(inputs, signature)
        return outputs

    def _look(self, inputs: tuple[Any, ...], signature: Signature) -> Any:
        """Run eager, and set ``reason`` if a capture would fail. Notes the graph's need."""
        drawn = _host_draws()
        with _host_waits() as waits, _Watch() as watch:
            outputs = self._encode.run_eagerly(*inputs)
        if _host_draws() != drawn:
            self.reason = "its forward draws random numbers on the host, which a replay would repeat"
        elif waits:
            self.reason = f"its forward makes the host wait for the device ({waits[0]})"
        elif watch.crossing is not None:
            self.reason = f"its forward copies a tensor {watch.crossing}"
        for leaf in batches.leaves(outputs):
            if not isinstance(leaf, _COPIED_OUT):
                self.reason = (
                    f"it returns a {type(leaf).__name__}, whose tensors cannot be copied out of a graph (output= selects some)"
                )
        self.reason = self.reason or why_not_capturable(self._encode.module)
        inputs_bytes = sum(value.nbytes for value in inputs if isinstance(value, torch.Tensor))
        if len(self._needs) == MOST_SIGNATURES:
            self._needs.clear()
        self._needs[signature] = Need(watch.allocated.peak_bytes, inputs_bytes + held_bytes(batches.leaves(outputs)))
        return outputs

    def _capture(self, inputs: tuple[Any, ...], need: Need) -> _Graph:
        static = tuple(self._static_like(value) for value in inputs)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = Pool()
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
        return _Graph(graph, static, outputs, need, tables(self._encode.module))

    def _static_like(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
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


def _is_on_card(value: Any) -> bool:
    return type(value) is torch.Tensor and value.is_cuda


def why_not_capturable(encoder: nn.Module) -> str | None:
    """The reason why ``encoder`` cannot be captured, as far as it shows without a run; else ``None``."""
    dynamo: Any = sys.modules.get("torch._dynamo")  # importing it takes a second, and torch.compile has done so
    for name, module in encoder.named_modules():
        compiled = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
        if compiled or getattr(module, "_compiled_call_impl", None) is not None:
            return "it is compiled, and may be running from graphs of its own"
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        calls = any(not str(getattr(hook, "__module__", "")).startswith(_PARTS_OF_FORWARD) for hook in hooks)
        # Accelerate's, which move weights from device to device, wrap forward.
        if calls or hasattr(module, "_hf_hook"):
            return f"it has forward hooks (on {name or 'the encoder itself'}), which a replay would not call"
    if _global_hooks._global_forward_hooks or _global_hooks._global_forward_pre_hooks:
        return "all modules have forward hooks (register_module_forward_hook), which a replay would not call"
    return None


def _host_draws() -> tuple[Any, ...]:
    """States of the host's global generators, which change where numbers are drawn from them."""
    numpy_state: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy_state[1].tobytes(), numpy_state[2:]


@contextmanager
def _as_in_a_capture() -> Iterator[None]:
    """A block in which this thread is told that its stream captures a graph."""
    this = threading.get_ident()
    asked = torch.cuda.is_current_stream_capturing

    def answered() -> bool:
        return threading.get_ident() == this or asked()

    with mock.patch.object(torch.cuda, "is_current_stream_capturing", answered):
        yield


@contextmanager
def _host_waits() -> Iterator[list[str]]:
    """Collect the warnings of PyTorch's sync debug mode in the block. Other warnings are passed on."""
    locations: list[str] = []
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if mode == 0:  # a user who set one of the other modes wants what it does
                torch.cuda.set_sync_debug_mode("warn")
            yield locations
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    for warning in caught:
        if "synchronizing CUDA operation" in str(warning.message):
            locations.append(f"{warning.filename}:{warning.lineno}")
        elif "Synchronization debug mode is a prototype" not in str(warning.message):  # said once of the mode itself
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices allocations, and copies between host and device, which sync debug mode misses if they are asynchronous."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.crossing: str | None = None
        self.allocated = PeakAllocation()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.allocated.note()
        if func._schema.name in {"aten::_to_copy", "aten::copy_"} and isinstance(result, torch.Tensor):
            source = args[-1] if func._schema.name == "aten::_to_copy" else args[1]
            if isinstance(source, torch.Tensor) and source.device != result.device:
                self.crossing = self.crossing or f"from {source.device} to {result.device}"
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
