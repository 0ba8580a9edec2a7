"""``FeatureStage``: a stage that runs a frozen encoder, or several (*branches*), each on a separate *lane* (CUDA stream).

An encoder runs from a CUDA graph, or *eager*: its kernels are launched one by one. A *bound* stage is a stage in one loader.
A *member* is an entry of a batch.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import nn

from gpuaug.core import batch as batches
from gpuaug.core.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    one_of,
    shown,
    warn,
    whole_number,
)
from gpuaug.core.rng import Generators, Position
from gpuaug.core.streams import Event, Lanes
from gpuaug.stages import hints
from gpuaug.stages.base import BoundStage, HeldBytes, Stage
from gpuaug.stages.cuda_graph import CaptureError, GraphRunner, copied
from gpuaug.stages.encoders import (
    Encoder,
    EncoderCall,
    fixed_arguments,
    is_encoder,
    module_code,
    module_of,
    name_of,
    set_evaluation_mode,
)
from gpuaug.stages.graph_memory import MAX_GRAPHS, Signatures, default_max_bytes, total_bytes
from gpuaug.stages.selection import Into, On

_MAX_LISTED_PARAMETERS = 8
"""Maximum number of an encoder's parameters that an error message lists."""


class FeatureStage(Stage):
    """Run a frozen encoder without autograd, on a separate lane, from a CUDA graph for shapes that repeat.

    The encoder always runs in ``eval()`` mode, also after ``train()`` was called on a model that contains the encoder. Batches
    that were launched before a change of the weights are encoded with the old weights. Consecutive feature stages run in
    parallel if none of them writes a member that another one reads.

    Args:
        encoder: A module, a bound method of a module (``vae.encode``), or a ``functools.partial`` of one of these with further
            arguments. The module must be on the loader's device, and its parameters must not require grad. A mapping of names
            to encoders runs the encoders in parallel on the same input, each on a separate lane, and returns a mapping of
            results. Encoders must not write to their input.
        on: Members of the batch to encode. By default the batch if it is a tensor, or index 0 of a tuple or list; other
            containers need ``on``. A tuple passes several members in order, a mapping ``{member: parameter}`` by keyword.
            Several members require ``into``, unless the encoder returns a tuple of equal length.
        into: Member to write the result to. By default the input is replaced.
        output: Part of the result to keep: a key, attribute or index, a dotted path of these, such as
            ``"latent_dist.parameters"``, or a function of the result, such as ``lambda encoded: encoded.latent_dist.sample()``.
            Random numbers of the function, as of the encoder, depend only on the batch. By default the whole result.
        autocast: dtype of ``torch.autocast``. By default autocast is set as on the training thread at ``next()``.
        memory_format: Memory format to which the weights, in place, and four-dimensional inputs are converted.
        capture: ``"auto"`` replays a CUDA graph for a batch if its shapes, dtypes, strides, arithmetic settings and weight
            addresses have occurred earlier in the epoch; ``"never"`` runs all batches eager, without graphs. Python code in
            ``forward`` does not run in a replay, so results must depend only on tensors.
        graph_bytes: Maximum bytes of device memory for the graphs of an encoder. Further shapes in an epoch run eager. By
            default a quarter of the device's memory.
        cache: ``FeatureCache`` that stores the results of this stage and of the stages before it.
        name: Name of the stage in errors and traces, and part of the key of its random numbers.

    Raises:
        ArgumentTypeError: If ``encoder`` is not an encoder or a mapping of encoders, or has a module as a fixed argument.
        ArgumentError: If a parameter of the encoder requires grad, or another argument has an invalid value.

    Warns:
        GpuAugWarning: If the encoder cannot be captured, or a shape that repeats exceeds ``graph_bytes``.

    Cost:
        With a graph: one launch, one copy of the input and one of the output, for any encoder (``bench run frozen_resnet``).
        The capture of a shape launches the encoder once more. The graphs of an encoder share memory for the activations of the
        largest graph. Each graph has separate memory for inputs and outputs.

    Examples:
        >>> encoder = nn.Linear(4, 2).requires_grad_(False)
        >>> loader = [(torch.zeros(3, 4), torch.zeros(3))]
        >>> [features.shape for features, _ in StreamedLoader(loader, [FeatureStage(encoder)], device="cpu")]
        [torch.Size([3, 2])]
    """

    kind = "feature"

    def __init__(
        self,
        encoder: Callable[..., Any] | Mapping[str, Callable[..., Any]],
        *,
        on: On = ...,
        into: Into = ...,
        output: str | int | Callable[[Any], Any] | None = None,
        autocast: torch.dtype | None = None,
        memory_format: torch.memory_format | None = None,
        capture: Literal["auto", "never"] = "auto",
        graph_bytes: int | None = None,
        cache: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(on=on, into=into, name=name)
        capture = one_of("capture", capture, ("auto", "never"), "Leave it out to capture graphs if possible.")
        if autocast is not None and not (isinstance(autocast, torch.dtype) and autocast.is_floating_point):
            raise ArgumentError(f"autocast must be a floating dtype, got {shown(autocast)}. Write autocast=torch.bfloat16.")
        if memory_format is not None:
            formats = (torch.contiguous_format, torch.channels_last)
            memory_format = one_of("memory_format", memory_format, formats, "Leave it out to keep the encoder's format.")
        if graph_bytes is not None:
            graph_bytes = whole_number("graph_bytes", graph_bytes, "Leave it out for a quarter of the device's memory.")
        if (
            module_of(output) is not None  # its weights and mode would not be checked
            or isinstance(output, bool | type)
            or not (output is None or isinstance(output, str | int) or callable(output))
        ):
            raise ArgumentTypeError(
                f"output must be a key, an index or a function of the encoder's result, got {shown(output)}. "
                "Leave it out for the whole result."
            )
        if cache is not None and not hasattr(cache, "wrap"):
            raise ArgumentTypeError(f"cache must be a gpuaug.FeatureCache, got {shown(cache)}. Pass a gpuaug.FeatureCache.")
        self.encoder = encoder
        self.output = output
        self.autocast = autocast
        self.memory_format = memory_format
        self.graph_bytes = graph_bytes
        self.captures = capture == "auto"  # whether batches may run from CUDA graphs
        self.cache = cache
        self._bound_features: WeakSet[_BoundFeature] = WeakSet()
        """The bound stages of the loaders that exist."""
        self._inputs_to_capture: list[tuple[torch.Tensor, ...]] = []
        """Per graph, meta tensors like the inputs, from all calls of ``capture``."""
        self._prepare_encoders()
        if memory_format is not None:
            for module in self.branches.values():
                module.to(memory_format=memory_format)  # type: ignore[call-overload]

    def __repr__(self) -> str:
        return f"FeatureStage({', '.join(map(name_of, self._encoders.values()))})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_bound_features"}  # not valid in another process

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _bound_features=WeakSet())

    @property
    def branches(self) -> dict[str | None, nn.Module]:
        """Modules of the encoders, by name. A single encoder has the name ``None``.

        Raises:
            ArgumentTypeError: If ``encoder`` is neither an encoder nor a mapping of encoders.
        """
        modules = {name: module_of(encoder) for name, encoder in self._encoders.items()}
        return {name: module for name, module in modules.items() if module is not None}

    @property
    def _encoders(self) -> dict[str | None, Encoder]:
        """Encoders, by name, after a check of their types. A single encoder has the name ``None``."""
        encoders: dict[str | None, Any] = {None: self.encoder}
        if isinstance(self.encoder, Mapping | nn.ModuleDict) and not is_encoder(self.encoder):
            encoders = dict(self.encoder.items())
            unnamed = [name for name in encoders if not isinstance(name, str)]
            if unnamed:
                raise ArgumentTypeError(
                    f"The keys of encoder must be names, got {shown(unnamed[0])}. Pass {{'name': encoder}}."
                )
        if encoders and all(map(is_encoder, encoders.values())):
            fixed = batches.leaves([list(fixed_arguments(encoder)) for encoder in encoders.values()])
            modules = [argument for argument in fixed if module_of(argument) is not None]
            if modules:
                raise ArgumentTypeError(
                    f"Fixed arguments of an encoder must not be modules, got {name_of(modules[0])}. Make it a submodule of the "
                    "encoder, so that the stage puts it into evaluation mode."
                )
            return encoders
        advice = "Pass a function of tensors to a TransformStage"
        if isinstance(self.encoder, nn.ModuleList | nn.ModuleDict):
            advice = "Make it a submodule of an nn.Module whose forward calls its modules"
        elif isinstance(self.encoder, torch.export.ExportedProgram):
            advice = "Pass encoder.module()"
        raise ArgumentTypeError(
            "encoder must be an nn.Module, a bound method of one, or a mapping of names to such encoders, got "
            f"{type(self.encoder).__name__}. {advice}."
        )

    @contextmanager
    def update(self) -> Iterator[None]:
        """Change the encoder's weights within the block, in place or to new storage.

        Device work of the block starts after batches that are being encoded. Later batches are encoded after the block's work.
        If weights were moved to new storage, graphs are captured again.

        Raises:
            ArgumentError: If the stage has a feature cache; on leaving, if a parameter requires grad.

        Cost:
            Two events and waits per loader, and one read of each weight's address. The host waits only if weights were moved.

        Examples:
            >>> stage = FeatureStage(nn.Linear(4, 2).requires_grad_(False))
            >>> with stage.update():
            ...     _ = stage.encoder.weight.mul_(0.5)
        """
        if self.cache is not None:
            raise ArgumentError(
                "The encoder of a stage with a feature cache must not change within an epoch, got a call of update. Change the "
                "weights between two epochs."
            )
        for bound in self._bound_features:
            bound.before_update()
        try:
            yield
        finally:
            for bound in self._bound_features:
                bound.after_update()
        self._prepare_encoders()

    def capture(self, shapes: Iterable[Any]) -> None:
        """Capture graphs before the first epoch, in current and later loaders of the stage.

        It does not change which batches run from graphs: in every epoch, the first batch of a shape runs eager. Call
        ``capture`` under the autocast and arithmetic settings of the loop.

        Args:
            shapes: Per graph, the shape of a float32 input; or a tensor with the shape, dtype and strides of the input, on
                any device, including ``"meta"``; or a tuple of such tensors, in the order of ``on``. Values of the tensors
                are ignored: the encoder is captured on zeros.

        Raises:
            ArgumentError, ArgumentTypeError: If ``shapes`` is not a list of shapes, tensors or tuples of tensors.

        Cost:
            Two runs of the encoder per graph, and a wait for the device. No effect on a CPU.

        Examples:
            >>> stage = FeatureStage(nn.Conv2d(3, 8, 3).requires_grad_(False))
            >>> stage.capture([(2, 3, 32, 32), (2, 3, 24, 40)])
            >>> text = FeatureStage(nn.Embedding(100, 8).requires_grad_(False))
            >>> text.capture([torch.empty(2, length, dtype=torch.int64, device="meta") for length in (16, 32)])
        """
        if not isinstance(shapes, Iterable) or isinstance(shapes, str | bytes | Mapping | torch.Tensor):
            raise ArgumentTypeError(
                f"shapes must be a list of shapes or tensors, got {shown(shapes)}. Put it into a list: […]."
            )
        inputs = [_meta_inputs(shape) for shape in shapes]
        for bound in self._bound_features:
            bound.capture(inputs)
        self._inputs_to_capture += inputs

    def bind(self, name: str, lanes: Lanes) -> "BoundStage":
        """Bind the stage to a lane of one loader.

        Raises:
            ArgumentError: If a parameter of the encoder requires grad.
            DeviceError: If the encoder is not on the loader's device.
        """
        self._prepare_encoders()
        check_device(self, lanes.device)
        bound = _BoundFeature(name, self, lanes)
        self._bound_features.add(bound)
        bound.capture(self._inputs_to_capture)
        return bound

    def _prepare_encoders(self) -> None:
        """Check that no parameter of the encoders requires grad, and set evaluation mode."""
        for name, module in self.branches.items():
            trainable = [key for key, parameter in module.named_parameters() if parameter.requires_grad]
            if trainable:
                keys = ", ".join(trainable[:_MAX_LISTED_PARAMETERS] + ["…"] * (len(trainable) > _MAX_LISTED_PARAMETERS))
                code = module_code(self._encoders[name], name)
                raise ArgumentError(
                    f"The parameters of a frozen encoder must not require grad, got {len(trainable)} that do: {keys}. "
                    f"Freeze all parameters with {code}.requires_grad_(False). If some are trained, such as a head's, pass an "
                    "nn.Module of the other parts as the encoder."
                )
            set_evaluation_mode(module)


def check_device(stage: Stage, device: torch.device) -> None:
    """Check that the encoders of a ``FeatureStage`` are on ``device``, or, if it has no index, on any device of its type.

    Raises:
        DeviceError: If a weight is on another device.
    """
    if not isinstance(stage, FeatureStage):
        return
    for branch, module in stage.branches.items():
        for key, tensor in (*module.named_parameters(), *module.named_buffers()):
            weight_device = tensor.device if device.index is not None else torch.device(tensor.device.type)
            if weight_device != device:
                label = "encoder" if branch is None else f"encoder {branch!r}"
                raise DeviceError(
                    f"The {label} must be on the loader's device, {device}, got {key} on {tensor.device}. "
                    f"Move the encoder with {module_code(stage._encoders[branch], branch)}.to({str(device)!r})."
                )


class _BoundFeature(BoundStage):
    """A ``FeatureStage``, bound to one lane per encoder of one loader. A single encoder runs on the lane of the stage."""

    reads_only = True

    def __init__(self, name: str, stage: FeatureStage, lanes: Lanes) -> None:
        super().__init__(name, stage.selection, lanes)
        self._lanes = lanes
        self._branches = {branch: _Branch(name, stage, branch, lanes, self.encoder_runs) for branch in stage.branches}
        self._runners = [branch.runner for branch in self._branches.values() if branch.runner is not None]

    def held_bytes(self) -> HeldBytes:
        """Return the bytes of device memory of the CUDA graphs."""
        return HeldBytes(graph=sum(runner.num_bytes for runner in self._runners))

    def run(self, values: tuple[Any, ...], ready: Event, position: Position, iterator_state: dict[str, Any]) -> Any:
        hints.refuse_encoded(values)
        results: dict[str | None, Any] = {}
        try:
            for name, branch in self._branches.items():
                if branch.lane is not self.lane:
                    branch.lane.wait(ready)
                results[name] = branch.run(values, position, iterator_state)
        finally:
            # The loader records the event after the stage on the lane of the stage, so this lane waits for all encoders.
            for branch in self._branches.values():
                if branch.lane is not self.lane:
                    self.lane.wait(branch.lane.record_event())
        return results.get(None, results)  # a single encoder has no name

    def capture(self, inputs: Sequence[tuple[torch.Tensor, ...]]) -> None:
        """Capture graphs after writes of weights on the current stream. ``inputs``: per graph, tensors like its inputs."""
        if self._lanes.in_line or not inputs:
            return
        consumer = self._lanes.consumer()
        weights_written = consumer.record_event()
        with self._lanes.launching(consumer):
            for branch in self._branches.values():
                branch.lane.wait(weights_written)
                branch.capture(inputs)

    def before_update(self) -> None:
        """Make the current stream, on which the weights will be changed, wait for all encoding that is queued."""
        consumer = self._lanes.consumer()
        for branch in self._branches.values():
            consumer.wait(branch.lane.record_event())

    def after_update(self) -> None:
        """Make later encoding wait for the changes of the weights on the current stream."""
        weights_changed = self._lanes.consumer().record_event()
        for branch in self._branches.values():
            branch.lane.wait(weights_changed)
        for runner in self._runners:
            runner.refresh()


class _Branch:
    """One encoder of a stage, on one lane.

    Args:
        stage_name: Name of the stage in the loader.
        stage: The stage.
        branch: Name of the encoder in the stage; ``None`` for a single encoder, whose lane is the lane of the stage.
        lanes: Lanes of the loader.
        runs: Counter of the runs of the encoder, see ``BoundStage.encoder_runs``.
    """

    def __init__(self, stage_name: str, stage: FeatureStage, branch: str | None, lanes: Lanes, runs: Counter[str]) -> None:
        self._name = stage_name if branch is None else f"{stage_name}/{branch}"  # random numbers depend on it
        self.lane = lanes.lane(f"stage/{self._name}")
        self._device = lanes.device
        # Not a method of this class: the runner would refer to this object, and the reference cycle would keep graphs until a
        # garbage collection.
        self._encode = EncoderCall(
            stage._encoders[branch],
            stage.branches[branch],
            output=stage.output,
            argument_names=stage.selection.data_keys,
            device=lanes.device.type,
            autocast=stage.autocast,
            memory_format=stage.memory_format,
        )
        self._generators = Generators(lanes.device, libraries=True)
        self.runner: GraphRunner | None = None
        """Runner of the encoder from CUDA graphs; ``None``: all runs are eager."""
        if stage.captures and not lanes.in_line:
            max_bytes = default_max_bytes(lanes.device) if stage.graph_bytes is None else stage.graph_bytes
            self.runner = GraphRunner(self._encode, self.lane, max_bytes, runs)
        self._runs = runs
        self._warned: set[str] = set()  # warnings that were raised: "reason", "room"

    def run(self, values: tuple[Any, ...], position: Position, iterator_state: dict[str, Any]) -> Any:
        """Queue the encoding of ``values`` on the lane. The result has its own memory, which later runs do not overwrite."""
        key = position.key(self._name)
        self.lane.make_current()
        replayed = self._runs["replayed"]
        result = copied(self._run(values, key, iterator_state))
        self._runs["eager"] += self._runs["replayed"] == replayed
        return result

    def _run(self, values: tuple[Any, ...], key: int, iterator_state: dict[str, Any]) -> Any:
        """Run from a graph or eager. If a capture fails, run eager. ``key``: key of the random numbers."""
        if self.runner is not None:
            try:
                with self._generators.keyed(key):
                    return self.runner.run(values, iterator_state.setdefault(self._name, Signatures()))
            except BaseException as error:
                self._renew_generators()
                if not isinstance(error, CaptureError):
                    raise
            finally:
                self._warn_if_eager(self.runner)
        with self._generators.keyed(key):
            return self._encode.run_eagerly(*values)

    def capture(self, inputs: Sequence[tuple[torch.Tensor, ...]]) -> None:
        """Capture graphs on zeros like the tensors in ``inputs``, one graph per tuple."""
        if self.runner is None:
            return
        self.lane.make_current()
        try:
            for values in inputs:
                zeros = tuple(torch.zeros_like(value, device=self._device) for value in values)
                with self._generators.keyed(0):  # any key: the results are not used
                    self.runner.capture(zeros)
        except BaseException as error:
            self._renew_generators()
            if not isinstance(error, CaptureError):
                raise

    def _renew_generators(self) -> None:
        """Replace the generators after an error, unless graphs use them: a failed capture may leave them in capture mode."""
        if self.runner is None or len(self.runner) == 0:
            self._generators = Generators(self._device, libraries=True)

    def _warn_if_eager(self, runner: GraphRunner) -> None:
        """Warn, once per reason, if the encoder cannot be captured or a graph exceeds the memory limit."""
        if runner.eager_reason is not None and "reason" not in self._warned:
            self._warned.add("reason")
            warn(
                f"The kernels of stage {self._name!r} are launched one by one, because a CUDA graph cannot hold its encoder: "
                f"{runner.eager_reason}. Change that, or pass capture='never', which keeps the launches without this warning."
            )
        if runner.rejected_need is not None and "room" not in self._warned:
            self._warned.add("room")
            needed = total_bytes([runner.rejected_need])
            warn(
                f"Some shapes of stage {self._name!r} run without CUDA graphs, because a graph of {needed / 1e6:,.1f} MB "
                f"exceeds the limit for all graphs, {runner.max_bytes / 1e6:,.1f} MB and {MAX_GRAPHS} graphs. Pass a larger "
                "graph_bytes=, or use fewer shapes of batches."
            )


def _meta_inputs(shape: Any) -> tuple[torch.Tensor, ...]:
    """Return meta tensors like the inputs that one entry of ``shapes`` of ``FeatureStage.capture`` describes."""
    parts = (shape,) if isinstance(shape, torch.Tensor) else tuple(shape) if isinstance(shape, Iterable) else ()
    if parts and all(isinstance(part, torch.Tensor) for part in parts):
        return tuple(torch.empty_like(part, device="meta") for part in parts)
    way_out = "Write the shape with its batch size: (8, 3, 512, 512)."
    if parts and not isinstance(shape, str | bytes | Mapping):
        sizes = [whole_number("shapes", size, way_out) for size in parts]
        return (torch.empty(sizes, dtype=torch.float32, device="meta"),)
    raise ArgumentTypeError(f"shapes must hold shapes, tensors or tuples of tensors, got {shown(shape)}. {way_out}")
