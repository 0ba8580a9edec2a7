"""A frozen encoder as a stage."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import nn

from gpuaug.core.errors import ArgumentError, ArgumentTypeError, DeviceError, GpuAugWarning, one_of, shown
from gpuaug.core.rng import Generators, Position
from gpuaug.core.streams import Event, Lane, Lanes
from gpuaug.stages.base import BoundStage, Stage
from gpuaug.stages.cuda_graph import CaptureError, GraphRunner
from gpuaug.stages.selection import Into, On


class FeatureStage(Stage):
    """A frozen encoder on a lane of its own: evaluated without autograd, from a CUDA graph where shapes repeat.

    The stage owns the encoder's mode: it runs in ``eval()``, also after ``train()`` was called on a model that contains it.
    Batches that are already on their way when weights change were encoded with the old ones.

    Args:
        encoder: A module on the loader's device whose parameters do not require grad; or a mapping of names to such modules,
            which run side by side on the same input, a lane each, and give a mapping of results. They must not write to it.
        on: The member to encode. Left out: the batch if it is a tensor, index 0 if it is a tuple or list.
        into: Where the features go. Left out: in place of the input.
        autocast: Run under ``torch.autocast`` with this dtype. Left out: as the training thread is set in ``next()``.
        memory_format: Converts the encoder's weights, in place, and its four-dimensional inputs.
        capture: ``"auto"`` replays a CUDA graph for a batch whose shape, dtype, strides, switches of arithmetic and weight
            addresses have occurred earlier in the epoch; ``"never"`` runs every batch eager. Python code in ``forward`` runs
            only when a batch is eager or captured: results must follow from the tensors alone.
        name: Names the stage in errors and traces, and keys its draws.

    Raises:
        ArgumentTypeError: If ``encoder`` is not a module or a mapping of modules.
        ArgumentError: If one of its parameters requires grad, or another argument cannot be used.

    Cost:
        From a graph: one launch, a copy of the input and one of the output, whatever the encoder (``bench run frozen_resnet``).
        Capturing a shape launches the encoder once more. Each graph (four at most) holds its activations.

    Examples:
        >>> encoder = nn.Linear(4, 2).requires_grad_(False)
        >>> loader = [(torch.zeros(3, 4), torch.zeros(3))]
        >>> [features.shape for features, _ in StreamedLoader(loader, [FeatureStage(encoder)], device="cpu")]
        [torch.Size([3, 2])]
    """

    kind = "feature"

    def __init__(
        self,
        encoder: nn.Module | Mapping[str, nn.Module],
        *,
        on: On = ...,
        into: Into = ...,
        autocast: torch.dtype | None = None,
        memory_format: torch.memory_format | None = None,
        capture: Literal["auto", "never"] = "auto",
        name: str | None = None,
    ) -> None:
        super().__init__(on=on, into=into, name=name)
        capture = one_of("capture", capture, ("auto", "never"), "Leave it out to capture where it can be.")
        if autocast is not None and not (isinstance(autocast, torch.dtype) and autocast.is_floating_point):
            raise ArgumentError(f"autocast must be a floating dtype, got {shown(autocast)}. Write autocast=torch.bfloat16.")
        if memory_format is not None:
            formats = (torch.contiguous_format, torch.channels_last)
            memory_format = one_of("memory_format", memory_format, formats, "Leave it out for the encoder's own.")
        self.encoder = encoder
        self.autocast = autocast
        self.memory_format = memory_format
        self.capture = capture
        self._running: WeakSet[_BoundFeature] = WeakSet()
        self._own()
        if memory_format is not None:
            for module in self.branches.values():
                module.to(memory_format=memory_format)  # type: ignore[call-overload]

    def __repr__(self) -> str:
        names = ", ".join(type(module).__name__ for module in self.branches.values())
        return f"FeatureStage({names})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_running"}  # its loaders are of this process

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _running=WeakSet())

    @property
    def branches(self) -> dict[str | None, nn.Module]:
        """The encoders by name; a single one has none.

        Raises:
            ArgumentTypeError: If ``encoder`` is not a module or a mapping of modules.
        """
        if isinstance(self.encoder, nn.Module) and not isinstance(self.encoder, nn.ModuleDict):
            return {None: self.encoder}
        if isinstance(self.encoder, Mapping | nn.ModuleDict):
            branches: dict[str | None, nn.Module] = dict(self.encoder.items())
            if branches and all(isinstance(module, nn.Module) for module in branches.values()):
                return branches
        raise ArgumentTypeError(
            f"encoder must be an nn.Module or a mapping of names to modules, got {type(self.encoder).__name__}. "
            "A function of tensors goes into a TransformStage."
        )

    @contextmanager
    def update(self) -> Iterator[None]:
        """Change the encoder's weights within the block, in place or to new storage.

        The block's device work starts after the batches that are being encoded, and later batches are encoded after it. If
        weights have moved, later batches are captured again.

        Raises:
            ArgumentError: On leaving, if a parameter requires grad.

        Cost:
            Two events and waits for each loader, and one read of each weight's address. The host waits only if weights moved.

        Examples:
            >>> stage = FeatureStage(nn.Linear(4, 2).requires_grad_(False))
            >>> with stage.update():
            ...     _ = stage.encoder.weight.mul_(0.5)
        """
        for bound in self._running:
            bound.before_update()
        try:
            yield
        finally:
            for bound in self._running:
                bound.after_update()
        self._own()

    def bind(self, name: str, lanes: Lanes) -> "BoundStage":
        """Prepare to run on the lanes of one loader.

        Raises:
            DeviceError: If the encoder is not on the loader's device.
        """
        check_device(self, lanes.device)
        bound = _BoundFeature(name, self, lanes)
        self._running.add(bound)
        return bound

    def _own(self) -> None:
        """Check that the encoders are frozen, and put them into evaluation mode."""
        for module in self.branches.values():
            learning = [key for key, parameter in module.named_parameters() if parameter.requires_grad]
            if learning:
                raise ArgumentError(
                    f"The parameters of a frozen encoder must not require grad, got {len(learning)} that do, {learning[0]} "
                    "first. Freeze it with encoder.requires_grad_(False)."
                )
            module.eval()


def check_device(stage: Stage, device: torch.device) -> None:
    """Refuse another device than that of an encoder, or without an index another kind. Stages of other classes take any.

    Raises:
        DeviceError: If it is another.
    """
    for branch, module in stage.branches.items() if isinstance(stage, FeatureStage) else ():
        for key, tensor in _weights(module):
            there = tensor.device if device.index is not None else torch.device(tensor.device.type)
            if there != device:
                which = "encoder" if branch is None else f"encoder {branch!r}"
                raise DeviceError(
                    f"The {which} must be on the loader's device, {device}, got {key} on {tensor.device}. "
                    f"Move it with encoder.to({str(device)!r})."
                )


class _BoundFeature(BoundStage):
    def __init__(self, name: str, stage: FeatureStage, lanes: Lanes) -> None:
        super().__init__(name, stage.selection, lanes)
        self._lanes = lanes
        self._branches = {
            branch: _Branch(
                module,
                stage,
                name if branch is None else f"{name}/{branch}",
                self.lane if branch is None else lanes.lane(f"stage/{name}/{branch}"),
                lanes,
            )
            for branch, module in stage.branches.items()
        }

    def run(self, values: tuple[Any, ...], ready: Event, position: Position, memory: dict[str, Any]) -> Any:
        results: dict[str | None, Any] = {}
        try:
            for name, branch in self._branches.items():
                if branch.lane is not self.lane:
                    branch.lane.wait(ready)
                results[name] = branch.run(values, position, memory)
        finally:
            # The loader records an event on this stage's own lane, so it must come after every branch's.
            for branch in self._branches.values():
                if branch.lane is not self.lane:
                    self.lane.wait(branch.lane.record_event())
        return results.get(None, results)  # a single encoder has no name

    def before_update(self) -> None:
        consumer = self._lanes.consumer()
        for branch in self._branches.values():
            consumer.wait(branch.lane.record_event())

    def after_update(self) -> None:
        changed = self._lanes.consumer().record_event()
        for branch in self._branches.values():
            branch.lane.wait(changed)
            branch.refresh()


class _Branch:
    """One encoder on one lane."""

    def __init__(self, encoder: nn.Module, stage: FeatureStage, name: str, lane: Lane, lanes: Lanes) -> None:
        self.lane = lane
        self._name = name
        self._device = lanes.device
        # Not a method: the runner would hold this object, which holds it, and its graphs their memory until both are collected.
        self._encode = partial(_encode, encoder, lanes.device.type, stage.autocast, stage.memory_format)
        self._generators = Generators(lanes.device)
        captures = stage.capture == "auto" and not lanes.in_line
        self._runner = GraphRunner(self._encode, encoder, lane, stage.memory_format) if captures else None
        self._warned = False

    def run(self, values: tuple[Any, ...], position: Position, memory: dict[str, Any]) -> Any:
        key = position.key(self._name)
        self.lane.make_current()
        if self._runner is None:
            with self._generators.keyed(key):
                return self._encode(*values)
        try:
            with self._generators.keyed(key):
                return self._runner.run(values, memory.setdefault(self._name, set()))
        except CaptureError:
            self._generators = Generators(self._device)
            with self._generators.keyed(key):
                return self._encode(*values)
        finally:
            self._warn_if_eager()

    def refresh(self) -> None:
        if self._runner is not None:
            self._runner.refresh()

    def _warn_if_eager(self) -> None:
        if self._runner is None or self._runner.reason is None or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"The kernels of stage {self._name!r} are launched one by one, because a CUDA graph cannot hold its encoder: "
            f"{self._runner.reason}. Remove that, or pass capture='never' to run the encoder so without this warning.",
            GpuAugWarning,
            stacklevel=2,
        )


def _encode(
    encoder: nn.Module, device: str, autocast: torch.dtype | None, memory_format: torch.memory_format | None, *values: Any
) -> Any:
    if any(module.training for module in encoder.modules()):
        encoder.eval()
    # The cache of autocast would keep casts of weights that were made in a graph's own memory.
    cast = torch.autocast(device, dtype=autocast, cache_enabled=False) if autocast else nullcontext()
    with torch.no_grad(), cast:
        return encoder(*(_formatted(value, memory_format) for value in values))


def _formatted(value: Any, memory_format: torch.memory_format | None) -> Any:
    if memory_format is None or not isinstance(value, torch.Tensor) or value.ndim != 4:
        return value
    return value.contiguous(memory_format=memory_format)


def _weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
