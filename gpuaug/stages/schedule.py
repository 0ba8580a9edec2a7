"""Stages that change with the epoch: ``until`` and ``schedule``.

A *schedule* is a stage that contains several stages and runs one of them, which depends on the epoch. All of them are created
and *bound* to a *lane* (a CUDA stream) once. When an iterator of the loader begins, the loader takes the stage for its epoch
from the attribute ``by_epoch``. So the choice depends only on the epoch.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from operator import itemgetter
from typing import Any

from gpuaug.core.errors import ArgumentError, ArgumentTypeError, shown, whole_number
from gpuaug.core.streams import Lanes
from gpuaug.stages.base import BoundStage, Stage, as_stage

_COUNT_EPOCHS = "Count epochs from 0."


def until(epoch: int, first: Any, then: Any) -> Stage:
    """Return a stage that runs ``first`` in the epochs before ``epoch``, and ``then`` from ``epoch`` on.

    Args:
        epoch: First epoch of ``then``. 0: ``then`` runs in all epochs.
        first: Stage, or callable to be wrapped in a ``TransformStage``. It may be the result of ``until`` or ``schedule``.
        then: Stage or callable, like ``first``. It may read and write other members of the batch.

    Returns:
        The stage, with the name of ``first`` and ``then``.

    Raises:
        ArgumentError: If ``epoch`` is negative, ``first`` and ``then`` have different names, or one has a feature cache.
        ArgumentTypeError: If ``epoch`` is not a whole number, or ``first`` or ``then`` is neither a stage nor a callable.

    Cost:
        As of ``schedule``.

    Examples:
        >>> stage = until(2, lambda images: images + 1, lambda images: images)
        >>> loader = StreamedLoader([torch.zeros(1)], [stage], device="cpu")
        >>> [batch.item() for epoch in range(4) for batch in loader]
        [1.0, 1.0, 0.0, 0.0]
    """
    start = whole_number("epoch", epoch, _COUNT_EPOCHS)
    stages = {0: as_stage(first), start: as_stage(then)}  # only ``then`` if ``start`` is 0
    return _Schedule(stages, stages)  # the second argument: values for ``repr``


def schedule(make: Callable[[Any], Any], values: Mapping[int, Any]) -> Stage:
    """Return a stage that changes with the epoch: from each epoch in ``values`` on, it is ``make(value)``.

    In every epoch, batches equal the batches of a loader with this epoch's stage in place of the schedule, bit for bit. The
    epoch is the loader's: ``set_epoch`` and ``load_state_dict`` select the stage. Workers of the wrapped loader have no part.

    Args:
        make: Function that returns a stage, or a callable to be wrapped in a ``TransformStage``, for a value. It is called at
            once, and only once for equal values.
        values: First epoch → value, which applies until the next epoch in the mapping. Epoch 0 must have a value.

    Returns:
        The stage. Its name, on which random numbers depend, is the name of the stages that ``make`` returns. The stages are in
        its attribute ``by_epoch``.

    Raises:
        ArgumentError: If epoch 0 has no value, an epoch is negative, the stages have different names, or one has a feature
            cache.
        ArgumentTypeError: If ``values`` is not a mapping from whole numbers to hashable values, or ``make`` is not callable or
            returns neither a stage nor a callable.

    Cost:
        None per batch. The first batch of a stage takes as long as the first batch of a loader, for instance to compile
        kernels. All stages hold their memory in all epochs, such as the CUDA graphs of two encoders.

    Examples:
        >>> stage = schedule(lambda factor: lambda images: images * factor, {0: 1, 2: 5})
        >>> stage
        schedule({0: 1, 2: 5})
        >>> loader = StreamedLoader([torch.ones(1)], [stage], device="cpu")
        >>> [batch.item() for epoch in range(4) for batch in loader]
        [1.0, 1.0, 5.0, 5.0]
    """
    if not callable(make):
        raise ArgumentTypeError(f"make must be a function that returns a stage, got {shown(make)}. Pass lambda value: ….")
    if not isinstance(values, Mapping):
        raise ArgumentTypeError(f"values must map epochs to values, got {shown(values)}. Pass {{0: value, 10: value}}.")
    by_epoch = {whole_number("An epoch in values", epoch, _COUNT_EPOCHS): value for epoch, value in values.items()}
    if 0 not in by_epoch:
        raise ArgumentError(f"values must have a value for epoch 0, got {shown(by_epoch)}. Add 0: value.")
    make_once = lru_cache(maxsize=None, typed=True)(lambda value: as_stage(make(value)))
    stages: dict[int, Stage] = {}
    last = None
    for epoch, value in sorted(by_epoch.items(), key=itemgetter(0)):
        try:
            hash(value)
        except TypeError:
            raise ArgumentTypeError(
                f"values must hold hashable values, got {shown(value)}. Equal values share a stage: pass tuples in place of "
                "lists and arrays, and in place of a dict a key with which make looks it up."
            ) from None
        stage = make_once(value)
        if stage is not last:
            stages[epoch] = stage
        last = stage
    return _Schedule(stages, {epoch: by_epoch[epoch] for epoch in stages})


class _Schedule(Stage):
    """Stage that runs another stage, depending on the epoch.

    Args:
        stages: First epoch → stage, in the order of the epochs. A stage may be a schedule.
        values: First epoch → value from which the stage was made, for ``repr``.
    """

    def __init__(self, stages: Mapping[int, Stage], values: Mapping[int, Any]) -> None:
        first = stages[0]
        # ``on`` and ``into`` of this object have no effect: the loader uses ``on`` and ``into`` of the epoch's stage.
        super().__init__(on=first.selection.on, into=first.selection.into, name=first.name)
        for stage in stages.values():
            if stage.name != first.name:
                raise ArgumentError(
                    f"The stages of a schedule must have one name, got {first.name!r} and {stage.name!r}. Pass the same name= "
                    "to all, on which random numbers depend."
                )
            if stage.cache is not None:
                raise ArgumentError(
                    f"The stages of a schedule must have no feature cache, got {shown(stage)} with one. Pass the encoder as a "
                    "separate stage after the schedule."
                )
        self.kind = first.kind
        self._values = values
        self._by_epoch = _flat(stages)

    @property
    def by_epoch(self) -> Mapping[int, Stage]:
        """First epoch → stage that runs from this epoch on, in the order of the epochs. No stage is a schedule."""
        return self._by_epoch

    def __repr__(self) -> str:
        return f"schedule({self._values})"

    def bind(self, name: str, lanes: Lanes) -> BoundStage:
        """Not implemented: a loader binds the stages in ``by_epoch``."""
        raise NotImplementedError


def _flat(stages: Mapping[int, Stage]) -> dict[int, Stage]:
    """Return ``stages`` (first epoch → stage) with each schedule replaced by its stages."""
    flat: dict[int, Stage] = {}
    starts = [*stages]
    for start, end in zip(starts, [*starts[1:], float("inf")], strict=True):
        for epoch, stage in stages[start].by_epoch.items():
            if epoch < end:
                flat[max(epoch, start)] = stage  # of several stages that begin before ``start``, the last one remains
    return flat
