"""Comparison of a state with this run: loader, stages, decoders, seed and number of ranks."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpuaug.core.errors import ArgumentError, shown
from gpuaug.feed.resumable import ResumableLoader, is_state
from gpuaug.feed.stateful import StatefulLoader
from gpuaug.loader.definition import definition
from gpuaug.loader.sharding import count_ranks
from gpuaug.stages.base import BoundStage, Stage

WAY_OUT = "Pass what state_dict() of a StreamedLoader returned."

Stages = Sequence[tuple[BoundStage, Stage]]
"""(stage on its lane, stage as the user made it) for each stage."""


def description(stages: Stages, resumable: ResumableLoader | None, decoders: Collection[str] = ()) -> dict[str, Any]:
    """Settings that batches depend on besides the wrapped loader and the seed, as plain values.

    Args:
        stages: Stages of the loader.
        resumable: Begins epochs of the wrapped loader at any batch, if that is possible.
        decoders: Keys of a state's decoders, which are compared before a batch has needed them.
    """
    ranks = resumable.ranks if resumable is not None else None
    versions = {key: version for bound, _ in stages for key, version in bound.versions(decoders).items()}
    return {
        "ranks": count_ranks() if ranks is None else ranks,
        "stages": {bound.name: definition(stage) for bound, stage in stages},
        **({"decoders": versions} if versions else {}),
    }


def check_source(
    source: Any, batch: int, loader: Any, resumable: ResumableLoader | None, stateful: StatefulLoader | None
) -> None:
    """Check that the wrapped loader's part of a state is of a loader of this kind, before anything acts on it.

    Raises:
        ArgumentError: If it is of another.
    """
    accepted = resumable is None or resumable.accepts(source) or (source is None and not batch)
    if not (accepted and (stateful is None or stateful.accepts(source))):
        raise ArgumentError(f"state['source'] must be that of a {type(loader).__name__}, got {shown(source)}. {WAY_OUT}")
    if resumable is None and is_state(source):
        raise ArgumentError(
            f"state['source'] must be that of a {type(loader).__name__}, got that of a plain DataLoader or a list. "
            "Wrap such a one."
        )
    if resumable is None and isinstance(source, Mapping) and hasattr(loader, "snapshot_every_n_steps"):  # of torchdata
        main = source.get("_snapshot", {}).get("_main_snapshot", {})
        workers = main.get("_num_workers", 0) if isinstance(main, Mapping) else 0
        if source and workers != loader.num_workers:
            raise ArgumentError(
                f"num_workers must be {workers}, with which the state was made, got {loader.num_workers}. "
                "A StatefulDataLoader goes on with as many workers as before; a plain DataLoader with any number."
            )


class Difference(NamedTuple):
    """An entry of a state that is another one in this run."""

    name: str
    then: Any
    here: Any
    way_out: str


def differences(state: Mapping[str, Any], now: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[Difference]:
    """Differences between the run of a state and this one.

    Args:
        state: The state.
        now: The same entries of this run.
        settings: What decides the batches of the wrapped loader besides their order, where that is known.
    """
    if state["seed"] != now["seed"]:
        yield Difference("seed", state["seed"], now["seed"], "Leave it out to adopt the state's.")
    if state["ranks"] != now["ranks"]:
        way_out = "Samples of a batch, their order and their draws depend on it."
        yield Difference("The number of ranks", state["ranks"], now["ranks"], way_out)
    before = state["source"]["settings"] if settings else {}
    for name in {**before, **settings}:
        then = before.get(name)
        here = settings.get(name)
        if then != here:
            yield Difference(f"The wrapped loader's {name}", then, here, "Make the loader as it was made then.")
    stages = state["stages"]
    own = now["stages"]
    if list(stages) != list(own):
        then, here = (", ".join(names) or "none" for names in (stages, own))
        yield Difference("The names of stages", then, here, "Their draws are keyed by name: give the stages of then.")
    for name in own:
        if name in stages and stages[name] != own[name]:
            yield Difference(f"Stage {name!r}", *_first_difference(stages[name], own[name]), "Give the stage of then.")
    before = state.get("decoders", {})
    decoders = now.get("decoders", {})
    for name in decoders:
        if name in before and before[name] != decoders[name]:
            way_out = "Pixels may differ by a few values; for the same ones, resume with the decoder of then."
            yield Difference(f"The decoder of stage {name!r}", before[name], decoders[name], way_out)


def _first_difference(then: str, here: str) -> tuple[str, str]:
    """The first arguments of two definitions that differ, with the beginning of the line that they stand in."""
    lines = [[*text.split("\n"), "nothing"] for text in (then, here)]
    one, two = next((pair for pair in zip(*lines, strict=False) if pair[0] != pair[1]), (then, here))
    some, others = (re.split(r", (?=\w+=)", line.strip()) for line in (one, two))
    some = [*some, "nothing"]
    others = [*others, "nothing"]
    at = next((at for at, pair in enumerate(zip(some, others, strict=False)) if pair[0] != pair[1]), 0)
    before = f"{some[0]}, …, " if at > 1 else f"{some[0]}, " if at else ""
    was, is_now = (f"{before}{parts[at]}" if parts[at].strip(")") else "nothing" for parts in (some, others))
    return was, is_now


def batches_had(state: Mapping[str, Any], now: Mapping[str, Any], settings: Mapping[str, Any], *, sharded: bool) -> int:
    """The number of batches of this run that hold the samples the training loop has had, rounded down.

    Args:
        state: The state.
        now: The same entries of this run.
        settings: Those of the wrapped loader.
        sharded: Whether its samplers divide the dataset among the ranks.
    """
    batch: int = state["batch"]
    then = state["source"]["settings"].get("batch_size")
    here = settings.get("batch_size")
    if not (isinstance(then, int) and isinstance(here, int) and then > 0 and here > 0):
        return batch
    ranks_then = state["ranks"] if sharded else 1
    ranks_here = now["ranks"] if sharded else 1
    samples: int = batch * then * ranks_then
    return samples // (here * ranks_here)
