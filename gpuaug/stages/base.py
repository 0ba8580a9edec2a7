"""Stages: work on a batch on the device, between its copy and the training loop.

A *member* is an entry of a batch. A stage is *bound* to a *lane* (a CUDA stream) of a loader. A batch is *submitted* when work
on other threads begins on it, such as decoding, and *launched* when its copy and stages are queued on the device. A *window* is
the part of an image that a stage reads. A *fused* transform is a result of ``gpuaug.fuse``. *Target dicts* are annotations, one
dict per image. A batch may hold them as ``PackedTargets``: one tensor per key.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, count
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentError, ArgumentTypeError, shown, warn
from gpuaug.core.packed_targets import has_pending_targets, is_packed, unpack_targets
from gpuaug.core.ragged import Shapes, Windows
from gpuaug.core.rng import CallSeeds, Generators, Position
from gpuaug.core.streams import Event, Lanes
from gpuaug.core.targets import holds_targets
from gpuaug.core.torchvision_types import names_drawing_once, unwrapped, unwrapped_with_code
from gpuaug.stages import hints
from gpuaug.stages.copy import accepts_keyword
from gpuaug.stages.encoders import module_of
from gpuaug.stages.first_call import FirstCall
from gpuaug.stages.selection import Into, On, Selection

T = TypeVar("T")


class Stage(ABC):
    """Base class of stages. A stage does not depend on the loader that runs it.

    Args:
        on: Members of a batch that the stage reads.
        into: Members of a batch that the stage replaces or adds.
        name: Name of the stage in errors and traces, on which the stage's random numbers depend. ``None``: the loader derives
            the name from ``kind``.

    Raises:
        ArgumentError: If ``name`` is not a string or is empty, or if ``on`` and ``into`` cannot be combined.
    """

    kind: str
    """Name of a stage that the user has not named; the loader adds a number if the name is taken. A schedule (``schedule.py``)
    has the ``kind`` of its stages."""

    cache: Any = None
    """``FeatureCache`` that stores the results of this stage and of the stages before it; ``None`` without a cache."""

    def __init__(self, *, on: On, into: Into, name: str | None) -> None:
        if name is not None and (not isinstance(name, str) or not name):
            raise ArgumentError(f"name must be a non-empty string, got {shown(name)}. Leave it out for {self.kind!r}.")
        self.selection = Selection(on, into, stage_class=type(self).__name__)
        self.name = name

    @property
    def by_epoch(self) -> Mapping[int, "Stage"]:
        """First epoch → stage that runs from this epoch on: ``{0: self}``, or the stages of a schedule."""
        return {0: self}

    @abstractmethod
    def bind(self, name: str, lanes: Lanes) -> "BoundStage":
        """Bind the stage to a lane of a loader.

        Args:
            name: Name of the stage in the loader.
            lanes: Lanes of the loader.

        Returns:
            The stage, bound to a separate lane.
        """


class DecodedSamples(NamedTuple):
    """Numbers of samples of one batch that a stage has decoded and replaced, with the reasons."""

    samples: int
    """Number of samples, including replaced samples."""
    replaced: int
    """Number of samples that were replaced."""
    problems: Mapping[str, str]
    """File of each replaced sample, or its index, batch and epoch if the file is not known → reason why it was replaced."""
    max_replaced: float
    """Largest share of the loader's samples that may be replaced, between 0 and 1."""


class HeldBytes(NamedTuple):
    """Bytes of memory that a stage holds."""

    pinned: int = 0
    """Page-locked memory."""
    decode: int = 0
    """Device memory of decoders, and of decoded pixels that are still allocated."""
    graph: int = 0
    """Device memory of CUDA graphs."""


class BoundStage(ABC):
    """A stage, bound to a lane of one loader."""

    def __init__(self, name: str, selection: Selection, lanes: Lanes) -> None:
        self.name = name
        self.lane = lanes.lane(f"stage/{name}")
        self.range_name = f"gpuaug/stage/{name}"
        """Name of the stage's range in profiler traces."""
        self.other_selections: Sequence[Selection] = ()
        """``on`` and ``into`` of the other stages of the loader, which sets them."""
        self.selection = selection
        """``on`` and ``into`` of this stage."""
        self.encoder_runs: Counter[str] = Counter()
        """Numbers of graphs that were ``captured``, and of runs of encoders from a graph (``replayed``) and without
        (``eager``), since the loader has read the numbers."""

    max_submitted: ClassVar[int] = 0
    """Maximum number of batches that are submitted and not yet launched. 0: the stage has no work on other threads."""
    reads_only: ClassVar[bool] = False
    """Whether the stage does not modify its inputs, so that other stages may read the same members at the same time."""

    def versions(self, required_keys: Collection[str] = ()) -> dict[str, str]:
        """Return the names and versions of the decoders that the stage has used. The last bits of pixels depend on them.

        Args:
            required_keys: Keys that are returned even if no batch has used their decoders yet.

        Returns:
            Key → decoders and versions of their libraries, as checkpoints store them. The key is the name of the stage for
            decoders of images, and ``"<name>, clips"`` for decoders of clips.
        """
        return {}

    def submit(
        self, batch: Batch, iterator_state: dict[str, Any], position: Position, stages: Sequence["BoundStage"]
    ) -> tuple[Batch, Any]:
        """Begin the stage's work on other threads on a host batch, if the stage has such work. The copy lane must be current.

        Args:
            batch: Batch from the wrapped loader, or from the ``submit`` of an earlier stage.
            iterator_state: Name of a stage → object that the stage keeps for the duration of one iterator.
            position: Epoch and index of the batch, on which its random numbers depend.
            stages: All stages that will run on the batch, in order.

        Returns:
            Batch for the ``submit`` of the next stage or for the copy, and the work on other threads, a ``Decoding``
            (``decode/decoding.py``); ``None`` without such work.
        """
        return batch, None

    def held_bytes(self) -> HeldBytes:
        """Return the bytes of memory that the stage holds."""
        return HeldBytes()

    def close(self, iterator_state: dict[str, Any]) -> None:
        """End the threads of the stage for one iterator. ``iterator_state``: see ``submit``."""

    def windows(self, batch: Batch, member: Any, shapes: Shapes, position: Position) -> Windows | None:
        """Return the windows: the part of each image that the stage will read. Called before the images are decoded.

        Args:
            batch: Batch with encoded images.
            member: Encoded images in the batch, which the decoded images will replace.
            shapes: Sizes of the images after decoding.
            position: Epoch and index of the batch, on which its random numbers depend.

        Returns:
            The windows; ``None`` if the stage reads whole images, or if the images stay in the batch after the stage.
        """
        return None

    def read(self, batch: Batch) -> tuple[Any, ...]:
        """Return the values that the stage reads from ``batch``. Target dicts in ``batch`` may be ``PackedTargets``."""
        return tuple(map(unpack_targets, self._values(batch)))

    def reads_pending(self, batch: Batch) -> bool:
        """Return whether the stage reads targets of a length that the host does not know, because a stage has removed boxes."""
        return has_pending_targets(self._values(batch))

    def _values(self, batch: Batch) -> tuple[Any, ...]:
        """Return the values as ``read`` does, but without unpacking ``PackedTargets``."""
        return self.selection.read(batch)

    def write(self, batch: Batch, result: Any) -> Batch:
        """Return a copy of ``batch`` with ``result`` in the members that ``into`` names."""
        return self.selection.write(batch, result)

    @abstractmethod
    def run(self, values: tuple[Any, ...], ready: Event, position: Position, iterator_state: dict[str, Any]) -> Any:
        """Queue the stage's work on its lane, which already waits for ``ready``.

        Args:
            values: Result of ``read``.
            ready: Event after the last write to ``values``. Other lanes that the stage uses must wait for this event.
            position: Epoch and index of the batch, on which its random numbers depend.
            iterator_state: See ``submit``.

        Returns:
            Result for ``write``.
        """


class TransformStage(Stage):
    """Run a callable on device tensors, on a separate lane: an augmentation pipeline, a tokeniser, a function.

    The callable is not moved, compiled or put into another mode. A module with parameters, or a method of one, runs without
    autograd, so that results do not require grad; a function, such as ``lambda images: module(images)``, may build an autograd
    graph. The callable may draw from the global generators of torch, NumPy and Python, whose states depend only on the batch
    and the name of the stage during the call, and are restored afterwards. The callable must not write to its input if ``into``
    keeps the input in the batch, or if the wrapped loader yields the same tensors again. It must clone any part of its input
    that it stores for a later call.

    Args:
        transform: A callable or ``nn.Module``. Called with the values that ``on`` names, in order, and, if ``on`` is a mapping,
            with ``data_keys=`` as Kornia's containers expect it.
        on: Members to read: a selector, a tuple or mapping of selectors, or ``None`` for the whole batch. Default: the batch if
            it is a tensor or a ``Ragged``, index 0 if it is a tuple or list; other containers need ``on``. A fused
            pipeline also gets the members that contain torchvision's ``Mask``, ``BoundingBoxes`` or ``KeyPoints``, unless
            ``into`` is passed.
        into: Members to write the result to. Default: the members that ``on`` names.
        name: Name of the stage in errors and traces, on which the stage's random numbers depend.

    Raises:
        ArgumentTypeError: If ``transform`` is not callable, or has no argument ``data_keys`` although ``on`` is a mapping.

    Warns:
        GpuAugWarning: If ``transform`` contains random transforms of torchvision, which draw once for the whole batch. At the
            first batch: if ``transform`` moves pixels of images, but does not transform their boxes, masks or keypoints.

    Cost:
        The launches of the transform, on the training thread: lanes overlap kernels, not Python. No further copy or host
        synchronisation.

    Examples:
        >>> loader = [(torch.zeros(2, 3, 4, 4), torch.tensor([0, 1]))]
        >>> stage = TransformStage(lambda images: images + 1)
        >>> [(images.mean().item(), labels.tolist()) for images, labels in StreamedLoader(loader, [stage], device="cpu")]
        [(1.0, [0, 1])]
    """

    kind = "transform"

    def __init__(self, transform: Callable[..., Any], *, on: On = ..., into: Into = ..., name: str | None = None) -> None:
        super().__init__(on=on, into=into, name=name)
        if isinstance(transform, type):
            raise ArgumentTypeError(
                f"transform must be an instance, got the class {transform.__name__}. Call it first: {transform.__name__}(…)."
            )
        if not callable(transform):
            raise ArgumentTypeError(
                f"transform must be a callable or nn.Module, got {type(transform).__name__}. Wrap the operation in a function "
                "of the tensors, fuse a list of transforms, and pass several stages one by one."
            )
        selectors = self.selection.on
        if isinstance(selectors, Mapping) and not _accepts_data_keys(transform):
            members = tuple(selectors) if len(selectors) > 1 else next(iter(selectors))
            raise ArgumentTypeError(
                f"transform must have an argument data_keys if on is a mapping, got {shown(transform)}. Pass on={members!r}."
            )
        names = names_drawing_once(transform)
        if names:
            code = unwrapped_with_code(transform)[1]
            warn(
                f"All images get the same random parameters, because torchvision's {', '.join(names)} draws once for the whole "
                f"batch. Pass gpuaug.fuse({code}), which draws for each image, or keep the transform in the dataset. To keep "
                "one draw per batch without this warning, pass lambda images: transform(images)."
            )
        self.transform = transform

    def __repr__(self) -> str:
        return f"TransformStage({getattr(self.transform, '__name__', type(self.transform).__name__)})"

    def bind(self, name: str, lanes: Lanes) -> "BoundStage":
        """Bind the stage to a lane of a loader."""
        return _BoundTransform(name, self, lanes)


class _BoundTransform(BoundStage):
    """A ``TransformStage``, bound to a lane of one loader."""

    def __init__(self, name: str, stage: TransformStage, lanes: Lanes) -> None:
        super().__init__(name, stage.selection, lanes)
        self._transform = stage.transform
        # A fused pipeline draws from its own generators, unless it calls modules that are not fused. Other transforms may draw
        # from the global generators, which are seeded for each call.
        pipeline = unwrapped(stage.transform)
        draws_only_from_seed = getattr(pipeline, "draws_only_from_seed", False)
        self._generators = None if draws_only_from_seed else Generators(lanes.device, libraries=True)
        # A fused pipeline also transforms members of torchvision's types that ``on`` does not name. With ``into`` it does not:
        # the original images stay in the batch, and so must the targets that belong to them.
        self._takes_tv_tensors = getattr(pipeline, "takes_tv_tensors", False) and stage.selection.into is ...
        self._takes_packed: bool = getattr(pipeline, "takes_packed", False)
        """Whether the transform accepts ``PackedTargets``."""
        self._typed_names: list[Any] = []
        """Names of the members in the current batch that ``on`` does not name, but that contain torchvision's tensors. Set by
        ``_values``."""
        self._is_first_batch = True
        module = module_of(stage.transform)
        self._has_weights = module is not None and next(module.parameters(), None) is not None

    def read(self, batch: Batch) -> tuple[Any, ...]:
        if self._is_first_batch:
            unpacked = unpack_targets(batch)
            values = self._values(unpacked)
            first_call = FirstCall(self._transform, values, self.selection, tuple(self._typed_names))
            hints.check_first(first_call, unpacked, self.other_selections)
            self._is_first_batch = False
        values = self._values(batch)
        return tuple(value if self._takes_packed and is_packed(value) else unpack_targets(value) for value in values)

    def reads_pending(self, batch: Batch) -> bool:
        return has_pending_targets(batch if self._is_first_batch else self._values(batch))

    def _values(self, batch: Batch) -> tuple[Any, ...]:
        values = self.selection.read(batch)
        self._typed_names = self._members_by_type(batch) if self._takes_tv_tensors else []
        return (*values, *(batches.member(batch, name) for name in self._typed_names))

    def _members_by_type(self, batch: Batch) -> list[Any]:
        """Return the names of the members that contain torchvision's tensors, such as ``Mask``, and are not in ``on``."""
        if self.selection.on is None or not batches.is_container(batch):
            return []
        selected = self.selection.names(batch)
        others = (name for name in batches.member_names(batch) if name not in selected)
        return [name for name in others if holds_targets(batches.member(batch, name))]

    def windows(self, batch: Batch, member: Any, shapes: Shapes, position: Position) -> Windows | None:
        windows_read = getattr(self._transform, "windows_read", None)
        if windows_read is None or self.selection.into is not ...:
            return None  # not a fused pipeline, or whole images stay in the batch
        values = self.selection.read(batch)
        # If samples have several images, ``value`` is a list of batches: batch ``number`` has image ``number`` per sample.
        matches = [
            (index, number)
            for index, value in enumerate(values)
            for number, images in enumerate(value if isinstance(value, list | tuple) else [value])
            if images is member
        ]
        keys = self.selection.normalized_keys or ["input"]
        index, number = matches[0] if len(matches) == 1 else (len(keys), 0)  # no data key has the index ``len(keys)``
        if keys[index : index + 1] != ["input"]:
            return None  # ``member`` is not the images that the pipeline transforms, or the pipeline reads it twice
        with CallSeeds(position, self.name):  # the same seeds as in ``run``, so the crops are the same
            windows: Windows | None = windows_read(shapes, number) if number else windows_read(shapes)
        if windows is None:
            return None
        has_targets = len(values) > 1 or (self._takes_tv_tensors and bool(self._members_by_type(batch)))
        return windows._replace(may_downsample=windows.may_downsample and not has_targets)

    def write(self, batch: Batch, result: Any) -> Batch:
        if not self._typed_names:
            return super().write(batch, result)
        num_selected = len(result) - len(self._typed_names)  # results for the members that ``on`` names come first
        new_batch = self.selection.write(batch, result[0] if num_selected == 1 else result[:num_selected])
        return batches.replace(new_batch, dict(zip(self._typed_names, result[num_selected:], strict=True)))

    def run(self, values: tuple[Any, ...], ready: Event, position: Position, iterator_state: dict[str, Any]) -> Any:
        self.lane.make_current()
        if self._generators is None:
            return self._transformed(values, position)
        with self._generators.keyed(position.key(self.name)):
            return self._transformed(values, position)

    def _transformed(self, values: tuple[Any, ...], position: Position) -> Any:
        """Return the result of the transform. An error gets a note if the transform may not accept the type of ``values``."""
        # Autograd is disabled only for modules with parameters: a function of the user may build an autograd graph.
        with CallSeeds(position, self.name), torch.no_grad() if self._has_weights else nullcontext():
            try:
                keys = self.selection.data_keys
                # A ``partial`` may fix the data keys, to which the keys of typed members must be added.
                if keys is None and self._typed_names and isinstance(self._transform, partial):
                    keys = self._transform.keywords.get("data_keys")
                if keys is None:
                    return self._transform(*values)
                return self._transform(*values, data_keys=[*keys, *("tv_tensors" for _ in self._typed_names)])
            except Exception as error:
                hints.explain_error(error, values)
                raise


def _accepts_data_keys(transform: Callable[..., Any]) -> bool:
    """Return whether a call of ``transform`` may have the argument ``data_keys``. True if its signature is not known."""
    is_module = isinstance(transform, torch.nn.Module) and type(transform).__call__ is torch.nn.Module.__call__
    return accepts_keyword(getattr(transform, "forward", transform) if is_module else transform, "data_keys", if_unknown=True)


def as_stage(stage: Any) -> Stage:
    """Return a stage; a callable is wrapped in a ``TransformStage``.

    Raises:
        ArgumentTypeError: If ``stage`` is neither a stage nor a callable.
    """
    return stage if isinstance(stage, Stage) else TransformStage(stage)


def as_stages(stages: Any) -> list[Stage]:
    """Check the argument ``stages`` of a loader. Return the stages, with callables wrapped in a ``TransformStage``.

    Raises:
        ArgumentTypeError: If ``stages`` is not a sequence of stages and callables.
        ArgumentError: If two stages have the same name.
    """
    if not isinstance(stages, Sequence) or isinstance(stages, str | bytes):
        raise ArgumentTypeError(
            f"stages must be a sequence of stages, got {type(stages).__name__}. Put it into a list: stages=[…]."
        )
    all_stages = [as_stage(stage) for stage in stages]
    user_names = [stage.name for stage in all_stages if stage.name is not None]
    for name in user_names:
        if user_names.count(name) > 1:
            raise ArgumentError(
                f"The names of stages must differ, got {name!r} twice. Pass another name=, on which its random numbers depend."
            )
    return all_stages


def bind_all(stages: Sequence[Stage], lanes: Lanes) -> list[dict[int, BoundStage]]:
    """Bind each stage to a lane, under its name in the loader. The stages of a schedule are bound to one lane.

    Returns:
        Per stage: first epoch → bound stage that runs from this epoch on.
    """
    by_epoch = []
    for name, stage in zip(names_of(stages), stages, strict=True):
        bound_stages = {id(inner): inner.bind(name, lanes) for inner in stage.by_epoch.values()}  # each stage once
        by_epoch.append({epoch: bound_stages[id(inner)] for epoch, inner in stage.by_epoch.items()})
    return by_epoch


def of_epoch(by_epoch: Mapping[int, T], epoch: int) -> T:
    """Return the value that applies in ``epoch``. ``by_epoch``: first epoch of a value → value."""
    return by_epoch[max(first for first in by_epoch if first <= epoch)]


def names_of(stages: Sequence[Stage]) -> list[str]:
    """Return the name of each stage in the loader: the user's name, or ``transform``, ``transform_2``, … from its ``kind``."""
    used_names = {stage.name for stage in stages if stage.name is not None}
    names = []
    for stage in stages:
        numbered = (f"{stage.kind}_{number}" for number in count(2))
        name = stage.name or next(name for name in chain([stage.kind], numbered) if name not in used_names)
        used_names.add(name)
        names.append(name)
    return names
