"""CUDA graphs of a frozen encoder: one launch instead of hundreds.

A graph replays fixed kernels on fixed addresses. So there is one graph per *signature*, all that determines them: shapes,
dtypes and strides of the inputs, arithmetic settings of torch, and addresses of the weights. A batch runs from a
graph if its signature has occurred earlier in the same iterator of the loader, and the graph fits into the memory limit.
Otherwise the batch runs *eager*: its kernels are launched one by one, as for a smaller last batch of an epoch. The choice
depends only on the sequence of batches, so it is the same for every ``depth`` (number of batches that are launched ahead).
A *leaf* is a value of a result that is not a container, such as a tensor.
"""

import gc
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.nn.modules import module as _global_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode

from gpuaug.core import batch as batches
from gpuaug.core.devices import host_waits
from gpuaug.core.generators import host_states
from gpuaug.core.streams import Lane
from gpuaug.stages.encoders import EncoderCall, attribute_tensors, is_dense, value_tensors
from gpuaug.stages.graph_memory import (
    MAX_SIGNATURES,
    MemoryNeed,
    PeakAllocation,
    Pool,
    Signature,
    Signatures,
    count_storage_bytes,
    fit,
)

_OUTPUT_TYPES = (torch.Tensor, int, float, str, type(None), torch.dtype, torch.device)
"""Types of leaves that the result of a captured encoder may contain."""

_CONSTANT_TYPES = (int, float, bool, str, type(None))
"""Types of inputs other than tensors. Their values are part of a signature."""

_HARMLESS_HOOK_MODULES = ("torch.nn.utils.", "transformers.utils.output_capturing")
"""Prefixes of Python modules whose forward hooks only compute or store tensors, such as weight norms and hidden states."""


class CaptureError(Exception):
    """A capture failed. Torch's random generator may still be in capture mode: replace it before the encoder runs again."""


class _Graph(NamedTuple):
    """A captured graph, and the tensors whose memory it reads and writes."""

    graph: Any
    """The ``torch.cuda.CUDAGraph``."""
    inputs: tuple[Any, ...]
    """Arguments of the captured call. Before a replay, the inputs of the batch are copied into the tensors among them."""
    outputs: Any
    """Result of the captured call, which every replay overwrites."""
    need: MemoryNeed
    """Device memory of the graph."""
    attribute_tensors: list[torch.Tensor]
    """Tensors in plain attributes of modules, such as position tables, which the graph reads. The references keep their memory
    if a module replaces them."""


class GraphRunner:
    """Runs an encoder on one lane (CUDA stream), eager or from CUDA graphs.

    Args:
        encode: Callable that runs the encoder without autograd.
        lane: Lane of the encoder. It must be current when ``run`` is called.
        max_bytes: Maximum bytes of device memory of the graphs.
        runs: Counter of ``captured`` graphs, and of ``replayed`` runs.
    """

    def __init__(self, encode: EncoderCall, lane: Lane, max_bytes: int, runs: Counter[str]) -> None:
        self._encode = encode
        self._lane = lane
        self.max_bytes = max_bytes
        self._pool: Pool | None = None
        self._graphs: dict[Signature, _Graph] = {}
        self._needs: dict[Signature, MemoryNeed] = {}
        """Signature that has run, of any iterator → memory of its graph, captured or not."""
        self._weights: list[torch.Tensor] = []
        """Tensors with the values of the parameters and buffers of the encoder."""
        self._addresses: tuple[int, ...] = ()
        """Addresses of ``_weights``."""
        self._runs = runs
        self.num_bytes = 0
        """Bytes of device memory of the graphs: their common pool, and their inputs."""
        self.rejected_need: MemoryNeed | None = None
        """Memory of the last graph that was not captured because it exceeds the limits; ``None`` if there is none."""
        self.eager_reason = why_not_capturable(encode.module)
        """Reason why all batches run eager, or ``None`` if the encoder can be captured."""
        self.refresh()

    def __len__(self) -> int:
        """Number of graphs that exist now."""
        return len(self._graphs)

    def run(self, inputs: tuple[Any, ...], signatures: Signatures) -> Any:
        """Queue the encoder's work on ``inputs``, from a graph if possible, and return the encoder's result.

        Pass the result to ``copied`` before the next run, which may overwrite it.

        Args:
            inputs: Arguments of the encoder.
            signatures: Signatures of the earlier batches of the iterator. The signature of ``inputs`` is added.

        Raises:
            CaptureError: If a capture failed. No work was queued, so the caller can run the encoder eager.
        """
        signature = self._signature(inputs) if self.eager_reason is None else None
        if signature is None:
            return self._encode.run_eagerly(*inputs)
        if signature not in signatures.needs:
            if len(signatures.needs) == MAX_SIGNATURES:
                return self._encode.run_eagerly(*inputs)
            if signature in self._needs:
                # Checked again, because the user may have added hooks since the last iterator.
                self.eager_reason = why_not_capturable(self._encode.module)
                result = self._encode.run_eagerly(*inputs)
            else:
                result = self._run_and_inspect(inputs, signature)
            signatures.needs[signature] = self._needs[signature]
            return result
        if not signatures.should_capture(signature, self.max_bytes):
            self.rejected_need = signatures.needs[signature]
            return self._encode.run_eagerly(*inputs)
        if signature not in self._graphs:
            self._add_graph(signature, inputs, signatures.needs[signature])
        captured_graph = self._graphs[signature]
        # no_grad, because an input that requires grad would connect the copies of all batches in one autograd graph.
        with torch.no_grad():
            for static_value, value in zip(captured_graph.inputs, inputs, strict=True):
                if isinstance(static_value, torch.Tensor):
                    static_value.copy_(value)
        captured_graph.graph.replay()
        self._runs["replayed"] += 1
        return captured_graph.outputs

    def capture(self, inputs: tuple[Any, ...]) -> None:
        """Capture a graph for the signature of ``inputs``, unless it exists, is not possible or exceeds the limits.

        Raises:
            CaptureError: If a capture failed.
        """
        signature = self._signature(inputs) if self.eager_reason is None else None
        if signature is None or signature in self._graphs:
            return
        if signature not in self._needs:
            self._run_and_inspect(inputs, signature)
        need = self._needs[signature]
        if not self._has_room(need):
            self.rejected_need = need
        elif self.eager_reason is None:
            self._add_graph(signature, inputs, need)

    def refresh(self) -> None:
        """Read the addresses of the encoder's weights. Delete all graphs if an address has changed."""
        module = self._encode.module
        self._weights = [part for tensor in (*module.parameters(), *module.buffers()) for part in value_tensors(tensor)]
        addresses = tuple(weight.data_ptr() for weight in self._weights)
        if addresses != self._addresses:  # the storage of a weight was replaced
            self._delete_graphs()
            self._needs.clear()
        self._addresses = addresses

    def _signature(self, inputs: tuple[Any, ...]) -> Signature | None:
        """Return the signature of ``inputs``, or ``None`` if a graph cannot read one of the inputs."""
        input_keys: list[Any] = []
        for value in inputs:
            if _is_on_gpu(value) and is_dense(value):
                input_keys.append((value.shape, value.dtype, value.stride()))
            elif type(value) in _CONSTANT_TYPES:
                input_keys.append((type(value), value))
            else:
                return None
        # Read for every batch: reading hundreds of addresses takes microseconds, and a replay saves milliseconds of launches.
        addresses = tuple(weight.data_ptr() for weight in self._weights)
        if addresses != self._addresses:
            self.refresh()
        return (tuple(input_keys), _arithmetic_settings(), self._addresses)  # one tuple of addresses for all signatures

    def _add_graph(self, signature: Signature, inputs: tuple[Any, ...], need: MemoryNeed) -> None:
        """Capture a graph. If it does not fit beside the existing graphs, first delete all: a pool never shrinks."""
        if not self._has_room(need):
            self._delete_graphs()
        self._graphs[signature] = self._capture(inputs, need)
        self._runs["captured"] += 1
        static_inputs = (value for graph in self._graphs.values() for value in graph.inputs if isinstance(value, torch.Tensor))
        self.num_bytes = sum(value.nbytes for value in static_inputs) + (self._pool.num_bytes if self._pool is not None else 0)

    def _has_room(self, need: MemoryNeed) -> bool:
        """Return whether a graph fits into the limits together with all graphs that exist."""
        return fit([need, *(graph.need for graph in self._graphs.values())], self.max_bytes)

    def _delete_graphs(self) -> None:
        """Delete all graphs and their pool, after their queued work."""
        if self._graphs:
            self._lane.record_event().synchronize()  # a graph in flight must not be destroyed
            self._graphs.clear()
        self._pool = None  # PyTorch releases a pool with its last graph
        self.num_bytes = 0

    def _run_and_inspect(self, inputs: tuple[Any, ...], signature: Signature) -> Any:
        """Run eager, record the memory that a graph needs, and detect operations with which a capture would fail.

        The run also warms up libraries and caches. The operations are detected before a capture, because a failed capture does
        not undo its side effects.
        """
        outputs = self._run_observed(inputs, signature)
        if self.eager_reason is not None:
            # The encoder may omit the operation during a capture: the library Transformers reads a mask on the host to choose
            # a kernel, but not during a capture. A second run shows whether a capture would fail. Its outputs are not used.
            self.eager_reason = None
            with _as_in_a_capture():
                self._run_observed(inputs, signature)
        return outputs

    def _run_observed(self, inputs: tuple[Any, ...], signature: Signature) -> Any:
        """Run eager, record the memory that a graph needs, and set ``eager_reason`` if a capture would fail."""
        states = host_states()
        observer = _Observer()
        try:
            with host_waits() as waits, observer:
                outputs = self._encode.run_eagerly(*inputs)
        finally:
            observer.remove()
        if host_states() != states:
            self.eager_reason = "its forward draws random numbers on the host, which a replay would repeat"
        elif waits:
            self.eager_reason = f"its forward makes the host wait for the device ({waits[0]})"
        elif observer.copy_direction is not None:
            self.eager_reason = f"its forward copies a tensor {observer.copy_direction}"
        for leaf in batches.leaves(outputs):
            is_nested = isinstance(leaf, torch.Tensor) and leaf.is_nested
            if is_nested or not isinstance(leaf, _OUTPUT_TYPES):
                name = "nested tensor" if is_nested else type(leaf).__name__
                self.eager_reason = f"it returns a {name}, whose tensors cannot be copied out of a graph (output= selects some)"
        self.eager_reason = self.eager_reason or why_not_capturable(self._encode.module)
        inputs_bytes = sum(value.nbytes for value in inputs if isinstance(value, torch.Tensor))
        if len(self._needs) == MAX_SIGNATURES:
            self._needs.clear()
        self._needs[signature] = MemoryNeed(
            observer.allocated.peak_bytes, inputs_bytes + count_storage_bytes(batches.leaves(outputs))
        )
        return outputs

    def _capture(self, inputs: tuple[Any, ...], need: MemoryNeed) -> _Graph:
        """Capture a graph for inputs like ``inputs``. Raise a ``CaptureError`` if the capture fails."""
        static_inputs = tuple(self._static_like(value) for value in inputs)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None or not self._graphs:  # PyTorch releases a pool with its last graph, and cannot use it again
            self._pool = Pool()
        # No garbage collection during the capture: it could destroy other graphs and events, which is not allowed then.
        gc_enabled = gc.isenabled()
        try:
            gc.disable()
            try:
                # thread_local, so that page-locked allocations in the DataLoader's pin thread do not invalidate the capture.
                graph.capture_begin(pool=self._pool.handle, capture_error_mode="thread_local")
                outputs = self._encode(*static_inputs)
                graph.capture_end()
            except BaseException as error:  # including interrupts: a capture must be ended before other work runs on the stream
                self._abandon(graph, error)
                raise
        except Exception as error:
            self.eager_reason = f"its capture failed: {error}"
            raise CaptureError(self.eager_reason) from error
        finally:
            if gc_enabled:
                gc.enable()
        return _Graph(graph, static_inputs, outputs, need, attribute_tensors(self._encode.module))

    def _static_like(self, value: Any) -> Any:
        """Return the input of a graph for ``value``: an uninitialised tensor like it; ``value`` itself if it is no tensor."""
        if not isinstance(value, torch.Tensor):
            return value
        if self._encode.memory_format is not None and value.ndim == 4:
            return torch.empty_like(value, memory_format=self._encode.memory_format)
        return torch.empty_like(value)

    def _abandon(self, graph: Any, error: BaseException) -> None:
        """End the capture that ``error`` has interrupted."""
        if torch.cuda.is_current_stream_capturing():
            try:
                graph.capture_end()
            except RuntimeError:
                self._release_pool()
        elif isinstance(error, Exception):
            self._release_pool()  # capture_begin or capture_end has raised the error
        # Otherwise an interrupt has arrived before the beginning or after the end of the capture.

    def _release_pool(self) -> None:
        """End the allocator's capture mode, in which it stays if ``capture_begin`` or ``capture_end`` raises.

        In capture mode, the allocator never reuses blocks for which ``record_stream`` was called.
        """
        assert self._pool is not None  # ``_capture`` has created it
        device = torch.cuda.current_device()
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(device, self._pool.handle)
            torch._C._cuda_releasePool(device, self._pool.handle)
        self._delete_graphs()


def copied(result: Any) -> Any:
    """Return a result of ``GraphRunner.run`` with copies of its tensors, which the user may keep.

    A tensor that occurs several times is copied once.
    """

    def cloned(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf

    return batches.map_leaves(batches.cached_by_id(cloned), result)


def _is_on_gpu(value: Any) -> bool:
    """Return whether a value is a plain tensor, not of a subclass, on a GPU."""
    return type(value) is torch.Tensor and value.is_cuda


def why_not_capturable(encoder: nn.Module) -> str | None:
    """Return the reason why a graph of ``encoder`` cannot be captured; ``None`` if no reason is known before a run."""
    # The import of ``torch._dynamo`` takes a second. If no other code has imported it, no module is compiled.
    dynamo: Any = sys.modules.get("torch._dynamo")
    for name, module in encoder.named_modules():
        is_compiled = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
        if is_compiled or getattr(module, "_compiled_call_impl", None) is not None:
            return "it is compiled, and may run from its own CUDA graphs"
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        has_user_hook = any(not str(getattr(hook, "__module__", "")).startswith(_HARMLESS_HOOK_MODULES) for hook in hooks)
        # Hooks of Hugging Face Accelerate, which move weights between devices, are not among ``hooks``: they wrap forward.
        if has_user_hook or hasattr(module, "_hf_hook"):
            return f"it has forward hooks (on {name or 'the encoder itself'}), which a replay would not call"
    if _global_hooks._global_forward_hooks or _global_hooks._global_forward_pre_hooks:
        return "all modules have forward hooks (register_module_forward_hook), which a replay would not call"
    return None


@contextmanager
def _as_in_a_capture() -> Iterator[None]:
    """Context manager in which ``torch.cuda.is_current_stream_capturing`` returns True on this thread, without a capture."""
    this_thread = threading.get_ident()
    original = torch.cuda.is_current_stream_capturing

    def is_capturing() -> bool:
        return threading.get_ident() == this_thread or original()

    with mock.patch.object(torch.cuda, "is_current_stream_capturing", is_capturing):
        yield


class _Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records allocations and copies between devices. ``host_waits`` detects no asynchronous copies."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copy_direction: str | None = None
        """Source and target of the first copy between two devices, as text; ``None`` if there was none."""
        self.allocated = PeakAllocation()

    def remove(self) -> None:
        """Deactivate the mode if it is still active, because an interrupt has arrived in ``__enter__`` or ``__exit__``."""
        if _get_current_dispatch_mode() is self:  # type: ignore[no-untyped-call]
            _pop_mode()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.allocated.update()
        if func._schema.name in {"aten::_to_copy", "aten::copy_"} and isinstance(result, torch.Tensor):
            source = args[0] if func._schema.name == "aten::_to_copy" else args[1]
            if isinstance(source, torch.Tensor) and source.device != result.device:
                self.copy_direction = self.copy_direction or f"from {source.device} to {result.device}"
        return result


def _arithmetic_settings() -> tuple[Any, ...]:
    """Return the global settings of torch that determine which kernels run."""
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
    """Return the settings of matrix products and of convolutions that allow TF32 in place of float32."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    if hasattr(cudnn, "conv"):  # from PyTorch 2.9 on; reading the older settings raises an error if the newer ones were set
        return cuda.matmul.fp32_precision, cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    return cuda.matmul.allow_tf32, cudnn.allow_tf32
