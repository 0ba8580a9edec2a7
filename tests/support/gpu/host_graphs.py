"""CUDA graphs on a CPU: a replay runs the encoder again on the graph's inputs, and writes into its outputs."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import ClassVar

import torch
from support.gpu.lanes import OnLanes

from gpuaug import StreamedLoader
from gpuaug.core import batch as batches
from gpuaug.stages import cuda_graph, feature
from gpuaug.stages.cuda_graph import GraphRunner, _Graph
from gpuaug.stages.encoders import attribute_tensors
from gpuaug.stages.graph_memory import MemoryNeed


class HostGraphs(GraphRunner):
    """Runs ``encode`` on a CPU as from graphs. Each needs as many bytes as its first input has, and its outputs."""

    forms: ClassVar[list] = []
    """How the encoders of all runners were run, in order, each with the length of its first input."""

    def _run_and_inspect(self, inputs, signature):
        result = super()._run_and_inspect(inputs, signature)
        self._needs[signature] = MemoryNeed(inputs[0].nbytes, self._needs[signature].io_bytes)
        return result

    def _capture(self, inputs, need):
        self.forms.append(("captured", len(inputs[0])))
        static = tuple(self._static_like(value) for value in inputs)
        for value in batches.tensors(static):
            value.zero_()
        drawn = torch.get_rng_state()
        outputs = self._encode(*static)
        torch.set_rng_state(drawn)  # to capture draws nothing

        def replay():
            self.forms.append(("replayed", len(inputs[0])))
            for kept, made in zip(batches.leaves(outputs), batches.leaves(self._encode(*static)), strict=True):
                if isinstance(kept, torch.Tensor) and kept is not made:
                    with torch.inference_mode(kept.is_inference()):
                        kept.copy_(made)

        return _Graph(SimpleNamespace(replay=replay), static, outputs, need, attribute_tensors(self._encode.module))

    def _measure(self):
        self.num_bytes = sum(graph.need.peak_bytes + graph.need.io_bytes for graph in self._graphs.values())


def install(patch):
    """Have feature stages run encoders from ``HostGraphs``. Returns the list of forms."""
    forms: ClassVar[list] = []
    patch.setattr(HostGraphs, "forms", forms)
    patch.setattr(feature, "GraphRunner", HostGraphs)
    patch.setattr(feature, "default_max_bytes", lambda device: 1 << 30)
    patch.setattr(cuda_graph, "_is_on_gpu", lambda value: type(value) is torch.Tensor)
    patch.setattr(cuda_graph, "host_waits", lambda: nullcontext([]))
    host_states = cuda_graph.host_states
    patch.setattr(cuda_graph, "host_states", lambda: host_states()[1:])  # without torch's generator
    return forms


def on_lanes(source, *stages, depth=2, **options):
    """A loader of a CPU that works ahead, as on a GPU."""
    loader = StreamedLoader(source, device="cpu", depth=depth, **options)
    loader._shared.device_setup.lanes = OnLanes(loader._shared.lanes)
    loader.stages = stages
    return loader
