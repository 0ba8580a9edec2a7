"""Stages: the work on a batch between its copy and the training loop."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple, Protocol

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentError, ArgumentTypeError, GpuAugWarning, shown
from gpuaug.core.ragged import Shapes, Windows
from gpuaug.core.rng import Calls, Generators, Position
from gpuaug.core.streams import Event, Lanes
from gpuaug.core.torchvision_types import drawn_once, holds_targets
from gpuaug.stages import hints
from gpuaug.stages.selection import Into, On, Selection


class Stage(ABC):
    """One step of the work on a batch, independent of the loader that runs it.

    Args:
        on: The members of a batch that the stage works on.
        into: The members of a batch that it replaces or adds.
        name: Names the stage in errors and traces, and keys its draws. ``None``: the loader names it after ``kind``.

    Raises:
        ArgumentError: If ``name`` is no string or empty, or ``on`` and ``into`` do not go together.
    """

    kind: ClassVar[str]
    """Default name of a stage."""

    def __init__(self, *, on: On, into: Into, name: str | None) -> None:
        if name is not None and (not isinstance(name, str) or not name):
            raise ArgumentError(f"name must be a non-empty string, got {shown(name)}. Leave it out for {self.kind!r}.")
        self.selection = Selection(on, into, kind=type(self).__name__)
        self.name = name

    @abstractmethod
    def bind(self, name: str, lanes: Lanes) -> "BoundStage":
        """Prepare to run on the lanes of one loader.

        Args:
            name: Name of the stage in the loader.
            lanes: Lanes of the loader.

        Returns:
            The stage on a lane of its own.
        """


class Pending(Protocol):
    """Work on one host batch that is done on other threads."""

    replaced: int
    """Samples replaced by others because their image could not be decoded."""
    undecoded: int
    """Pixels that are not decoded, because a later stage reads a window of each image alone."""

    def done(self) -> bool:
        """Whether ``collect`` will not wait for other threads."""
        ...

    def collect(self, batch: Batch, waiting: Callable[[], AbstractContextManager[None]] = nullcontext) -> Batch:
        """Wait for the work, order the copy lane, which is current, after it, and return the batch to copy.

        Args:
            batch: The batch that ``submit`` returned.
            waiting: Makes the block in which this thread blocks. Not called if the work is done.
        """
        ...

    def abandon(self) -> None:
        """Wait for the work. Its result is not needed."""
        ...


class EncoderRuns(NamedTuple):
    """How encoders have run."""

    captured: int = 0
    """Graphs captured."""
    replayed: int = 0
    """Runs from a graph."""
    eager: int = 0
    """Runs whose kernels were launched one by one."""


_NO_RUNS = EncoderRuns()


class BoundStage(ABC):
    """A stage on a lane of one loader."""

    def __init__(self, name: str, selection: Selection, lanes: Lanes) -> None:
        self.name = name
        self.lane = lanes.lane(f"stage/{name}")
        self.range_name = f"gpuaug/stage/{name}"
        self.others: Sequence[Selection] = ()
        """Selections of the other stages of the loader."""
        self._selection = selection

    ahead: ClassVar[int] = 0
    """Batches that are submitted besides those that are launched."""
    reads_only: ClassVar[bool] = False
    """Whether the stage leaves its input as it is, so that others may read the same members meanwhile."""

    def versions(self, named: Collection[str] = ()) -> dict[str, str]:
        """Decoders that decide the last bits of the results, each with its libraries and their versions, by key of a state.

        Args:
            named: Keys of a state. Decoders of these keys are included before a batch has needed them.
        """
        return {}

    def submit(
        self, batch: Batch, memory: dict[str, Any], position: Position, stages: Sequence["BoundStage"]
    ) -> tuple[Batch, "Pending | None"]:
        """Begin the stage's work on a host batch on other threads, if it has such work. The copy lane is current.

        Args:
            batch: As it came from the wrapped loader, or from another stage's ``submit``.
            memory: State that stages keep for the length of one iterator.
            position: Random-number key of the batch.
            stages: All stages that will run on the batch, in order.

        Returns:
            The batch to copy or to pass on, and the work, or ``None``.
        """
        return batch, None

    @property
    def pinned_bytes(self) -> int:
        """Page-locked bytes that the stage holds now."""
        return 0

    @property
    def decode_bytes(self) -> int:
        """Bytes on the device for decoded pixels of batches that have not been freed, and of decoders."""
        return 0

    @property
    def graph_bytes(self) -> int:
        """Bytes on the device of CUDA graphs."""
        return 0

    def encoder_runs(self) -> EncoderRuns:
        """How encoders of the stage have run since the last call."""
        return _NO_RUNS

    def close(self, memory: dict[str, Any]) -> None:
        """End threads and work that the stage has begun for one iterator."""

    def selected(self, batch: Batch) -> tuple[Any, ...]:
        """The values in ``batch`` that ``on`` names.

        Raises:
            SelectionError: If ``on`` does not fit ``batch``.
        """
        return self._selection.read(batch)

    def windows(self, batch: Batch, member: Any, shapes: Shapes, position: Position) -> Windows | None:
        """The part of each image that the stage reads, known before the images are.

        Args:
            batch: Batch whose images are not decoded.
            member: Member of the batch that stands for the images. The stage reads it.
            shapes: Sizes of the decoded images.
            position: Random-number key of the batch.

        Returns:
            The windows. ``None`` if the stage reads whole images, or leaves the images in the batch.
        """
        return None

    def read(self, batch: Batch) -> tuple[Any, ...]:
        """The values in ``batch`` that the stage works on."""
        return self._selection.read(batch)

    def write(self, batch: Batch, result: Any) -> Batch:
        """A batch with ``result`` in its place."""
        return self._selection.write(batch, result)

    @abstractmethod
    def run(self, values: tuple[Any, ...], ready: Event, position: Position, memory: dict[str, Any]) -> Any:
        """Queue the stage's work. Its lane has been made to wait for ``ready``.

        Args:
            values: The result of ``read``.
            ready: Event after the last write to ``values``, for further lanes of the stage.
            position: Random-number key of the batch.
            memory: State that stages keep for the length of one iterator.
        """


class TransformStage(Stage):
    """Any callable on device tensors, on a lane of its own: an augmentation pipeline, a tokeniser, a function.

    It is called as it is: never moved, compiled or put into another mode. It may draw from the global generators of torch,
    NumPy and Python, whose states then depend on the batch's position alone and are put back afterwards. It must not write to
    its input where ``into`` keeps that, or where the loader yields the same tensors again; and what it keeps of its input for a
    later call it must clone.

    Args:
        transform: A callable or ``nn.Module``. Called with the values that ``on`` names, in order, and with ``data_keys=``
            where ``on`` is a mapping, as Kornia's containers want it.
        on: What it works on: a selector, several, or ``None`` for the whole batch. Left out: the batch if it is a tensor
            or a ``Ragged``, index 0 if it is a tuple or list. To a fused pipeline the stage also hands the members that hold
            torchvision's ``Mask``, ``BoundingBoxes`` or ``KeyPoints``, unless ``into`` is passed.
        into: Where the result goes. Left out: where the input came from.
        name: Names the stage in errors and traces, and keys its draws.

    Raises:
        ArgumentTypeError: If ``transform`` cannot be called.

    Warns:
        GpuAugWarning: If ``transform`` has random ones of torchvision in it, which draw once for the whole batch; at the first
            batch, if it moves images and boxes, masks or keypoints beside them stay.

    Cost:
        The transform's own launches, from the training thread: lanes overlap kernels, not Python. No copy and no
        host synchronisation is added.

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
                f"transform must be a callable or nn.Module, got {type(transform).__name__}. "
                "Wrap what you want to be done in a function of the tensors."
            )
        once = drawn_once(transform)
        if once:
            warnings.warn(
                f"All images get one draw, because torchvision's {', '.join(once)} draws once for the whole batch. "
                "Pass gpuaug.fuse(transform), which draws for each image, or keep it in the dataset. If one draw for all is "
                "meant, pass lambda images: transform(images).",
                GpuAugWarning,
                stacklevel=2,
            )
        self.transform = transform

    def __repr__(self) -> str:
        return f"TransformStage({getattr(self.transform, '__name__', type(self.transform).__name__)})"

    def bind(self, name: str, lanes: Lanes) -> "BoundStage":
        """Prepare to run on the lanes of one loader."""
        return _BoundTransform(name, self, lanes)


class _BoundTransform(BoundStage):
    def __init__(self, name: str, stage: TransformStage, lanes: Lanes) -> None:
        super().__init__(name, stage.selection, lanes)
        self._transform = stage.transform
        draws_by_itself = getattr(stage.transform, "draws_by_itself", False)
        self._generators = None if draws_by_itself else Generators(lanes.device, libraries=True)
        # What stays beside the result still fits its image where the result goes elsewhere.
        self._follows_types = getattr(stage.transform, "follows_types", False) and stage.selection.into is ...
        self._typed: list[Any] = []
        """Members of the batch that the stage works on because torchvision's tensors are in them."""
        self._unseen = True

    def read(self, batch: Batch) -> tuple[Any, ...]:
        values = self._selection.read(batch)
        self._typed = self._members_by_type(batch) if self._follows_types else []
        values = (*values, *(batches.member(batch, name) for name in self._typed))
        if self._unseen:
            hints.check_first(self._transform, batch, values, self._selection, self.others)
            self._unseen = False
        return values

    def _members_by_type(self, batch: Batch) -> list[Any]:
        if self._selection.on is None or not batches.is_container(batch):
            return []
        others = (name for name in batches.member_names(batch) if name not in self._selection.names(batch))
        return [name for name in others if holds_targets(batches.member(batch, name))]

    def windows(self, batch: Batch, member: Any, shapes: Shapes, position: Position) -> Windows | None:
        windows_read = getattr(self._transform, "windows_read", None)
        values = self.selected(batch)
        places = [place for place, value in enumerate(values) if value is member]
        keys = self._selection.data_keys or ["input"]
        if windows_read is None or self._selection.into is not ... or len(places) != 1:
            return None
        if places[0] >= len(keys) or keys[places[0]] not in ("input", "image"):
            return None
        with Calls(position, self.name):
            found: Windows | None = windows_read(shapes)
        if found is None:
            return None
        followed = len(values) > 1 or (self._follows_types and bool(self._members_by_type(batch)))
        return found._replace(alone=found.alone and not followed)

    def write(self, batch: Batch, result: Any) -> Batch:
        if not self._typed:
            return self._selection.write(batch, result)
        count = len(result) - len(self._typed)
        written = self._selection.write(batch, result[0] if count == 1 else result[:count])
        return batches.replace(written, dict(zip(self._typed, result[count:], strict=True)))

    def run(self, values: tuple[Any, ...], ready: Event, position: Position, memory: dict[str, Any]) -> Any:
        self.lane.make_current()
        if self._generators is None:
            return self._transformed(values, position)
        with self._generators.keyed(position.key(self.name)):
            return self._transformed(values, position)

    def _transformed(self, values: tuple[Any, ...], position: Position) -> Any:
        with Calls(position, self.name):
            try:
                keys = self._selection.data_keys
                if keys is None:
                    return self._transform(*values)
                return self._transform(*values, data_keys=[*keys, *("tv_tensors" for _ in self._typed)])
            except Exception as error:
                hints.explain(error, values)
                raise


def as_stages(stages: Any) -> list[Stage]:
    """Check what was given as ``stages`` and wrap bare callables.

    Raises:
        ArgumentTypeError: If it is not a sequence of stages and callables.
        ArgumentError: If two stages were given one name.
    """
    if not isinstance(stages, Sequence) or isinstance(stages, str | bytes):
        raise ArgumentTypeError(
            f"stages must be a sequence of stages, got {type(stages).__name__}. Put it into a list: stages=[…]."
        )
    wrapped = [stage if isinstance(stage, Stage) else TransformStage(stage) for stage in stages]
    given = [stage.name for stage in wrapped if stage.name is not None]
    for name in given:
        if given.count(name) > 1:
            raise ArgumentError(
                f"The names of stages must differ, got {name!r} twice. Their draws are keyed by name: give each its own."
            )
    return wrapped


def bind_all(stages: Sequence[Stage], lanes: Lanes) -> list[BoundStage]:
    """Give every stage a name and a lane."""
    bound = [stage.bind(name, lanes) for name, stage in zip(names_of(stages), stages, strict=True)]
    for each in bound:
        each.others = [stage.selection for stage, other in zip(stages, bound, strict=True) if other is not each]
    return bound


def names_of(stages: Sequence[Stage]) -> list[str]:
    """The name of each stage: ``transform``, ``transform_2``, … where the user gave none."""
    taken = {stage.name for stage in stages if stage.name is not None}
    names = []
    for stage in stages:
        name = stage.name or stage.kind
        count = 1
        while stage.name is None and name in taken:
            count += 1
            name = f"{stage.kind}_{count}"
        taken.add(name)
        names.append(name)
    return names
