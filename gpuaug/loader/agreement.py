"""Comparison of a saved state with the current run: loader, stages, decoders, seed and number of ranks."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpuaug.core.errors import ArgumentError, shown
from gpuaug.feed.resumable import ResumableLoader, is_state
from gpuaug.feed.stateful import StatefulLoader, is_before_first
from gpuaug.loader.definition import definition
from gpuaug.loader.sharding import count_ranks
from gpuaug.stages.base import BoundStage, Stage

WAY_OUT = "Pass what state_dict() of a StreamedLoader returned."

Stages = Sequence[tuple[BoundStage, Stage]]
"""(``BoundStage``, ``Stage``) of each stage, in order. A ``BoundStage`` is a stage together with its lane (CUDA stream)."""


def description(stages: Stages, resumable: ResumableLoader | None, decoders: Collection[str] = ()) -> dict[str, Any]:
    """Return the number of ranks, the stages and their decoders as plain values: batches depend on them.

    Args:
        stages: Stages of the loader.
        resumable: Access to the state of the wrapped loader; ``None`` if an epoch cannot begin at any batch.
        decoders: Keys of the decoders in a saved state. Their versions are included even if no batch has used them yet.
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
    """Check that the wrapped loader's part of a state belongs to a loader of the same type.

    Raises:
        ArgumentError: If ``source`` belongs to another type of loader, or to torchdata's loader with another number of workers.
    """
    accepted = resumable is None or resumable.accepts(source) or (source is None and not batch)
    if not (accepted and (stateful is None or stateful.accepts(source))):
        raise ArgumentError(f"state['source'] must be the state of a {type(loader).__name__}, got {shown(source)}. {WAY_OUT}")
    if resumable is None and is_state(source):
        raise ArgumentError(
            f"state['source'] must be the state of a {type(loader).__name__}, got the state of a plain DataLoader or a list. "
            "Wrap a loader of the type that was wrapped in the saved run."
        )
    is_torchdata = resumable is None and isinstance(source, Mapping) and hasattr(loader, "snapshot_every_n_steps")
    if is_torchdata and not is_before_first(source):
        main = source.get("_snapshot", {}).get("_main_snapshot", {})
        workers = main.get("_num_workers", 0) if isinstance(main, Mapping) else 0
        if source and workers != loader.num_workers:
            raise ArgumentError(
                f"num_workers must be {workers}, as in the saved run, got {loader.num_workers}. "
                "A StatefulDataLoader resumes with the same number of workers only; a plain DataLoader with any number."
            )


class Difference(NamedTuple):
    """An entry of a saved state whose value differs in the current run."""

    name: str
    saved: Any
    current: Any
    way_out: str


def differences(state: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the differences between a saved state and the current run.

    Args:
        state: The saved state, and under ``"settings"`` the settings of the wrapped loader, such as its batch size.
        current: Values of the current run for the same keys.
    """
    if state["seed"] != current["seed"]:
        yield Difference("seed", state["seed"], current["seed"], "Leave seed out to use the seed of the state.")
    if state["ranks"] != current["ranks"]:
        way_out = "Start as many ranks as in the saved run: the samples of a batch and their random numbers depend on it."
        yield Difference("The number of ranks", state["ranks"], current["ranks"], way_out)
    settings = current["settings"]
    for name, saved_value in state["settings"].items():
        current_value = settings.get(name)
        if saved_value != current_value:
            way_out = "Create the loader with the settings of the saved run."
            yield Difference(f"The wrapped loader's {name}", saved_value, current_value, way_out)
    saved_stages = state["stages"]
    stages = current["stages"]
    if list(saved_stages) != list(stages):
        saved_names, current_names = (", ".join(names) or "none" for names in (saved_stages, stages))
        way_out = "Pass the stages of the saved run: the random numbers of a stage depend on its name."
        yield Difference("The names of stages", saved_names, current_names, way_out)
    for name in stages:
        if name in saved_stages and saved_stages[name] != stages[name]:
            arguments = _first_difference(saved_stages[name], stages[name])
            yield Difference(f"Stage {name!r}", *arguments, "Pass the stage of the saved run.")
    saved_decoders = state.get("decoders", {})
    decoders = current.get("decoders", {})
    for name in decoders:
        if name in saved_decoders and saved_decoders[name] != decoders[name]:
            way_out = "Pixels may differ by a few values; for equal pixels, resume with the decoder that made the checkpoint."
            yield Difference(f"The decoder of stage {name!r}", saved_decoders[name], decoders[name], way_out)


def _first_difference(saved: str, current: str) -> tuple[str, str]:
    """Return (saved, current) text of the first argument in which two definitions differ, with the beginning of its line."""
    lines = [[*text.split("\n"), "nothing"] for text in (saved, current)]
    first_lines = next((pair for pair in zip(*lines, strict=False) if pair[0] != pair[1]), (saved, current))
    saved_parts, current_parts = ([*re.split(r", (?=\w+=)", line.strip()), "nothing"] for line in first_lines)
    pairs = enumerate(zip(saved_parts, current_parts, strict=False))
    index = next((index for index, pair in pairs if pair[0] != pair[1]), 0)
    prefix = f"{saved_parts[0]}, …, " if index > 1 else f"{saved_parts[0]}, " if index else ""
    saved_text, current_text = (
        f"{prefix}{parts[index]}" if parts[index].strip(")") else "nothing" for parts in (saved_parts, current_parts)
    )
    return saved_text, current_text


def batches_done(state: Mapping[str, Any], current: Mapping[str, Any], *, sharded: bool) -> int:
    """Return the number of batches after which the current run has processed as many samples as the saved run, rounded down.

    Args:
        state: The saved state, and under ``"settings"`` the settings of the wrapped loader.
        current: Values of the current run for the same keys.
        sharded: Whether samplers of the wrapped loader divide the dataset among the ranks.
    """
    batch: int = state["batch"]
    saved_size = state["settings"].get("batch_size")
    current_size = current["settings"].get("batch_size")
    if not (isinstance(saved_size, int) and isinstance(current_size, int) and saved_size > 0 and current_size > 0):
        return batch
    saved_ranks = state["ranks"] if sharded else 1
    current_ranks = current["ranks"] if sharded else 1
    samples: int = batch * saved_size * saved_ranks
    return samples // (current_size * current_ranks)
