"""Comparison of a saved state with the current run: loader, stages, decoders, seed and number of ranks."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from gpuaug.feed.resumable import Source
from gpuaug.loader.sharding import count_ranks
from gpuaug.stages.base import BoundStage, Stage
from gpuaug.stages.definition import definition

Stages = Sequence[tuple[Mapping[int, BoundStage], Stage]]
"""(first epoch → ``BoundStage``, ``Stage``) of each stage, in order. A ``BoundStage`` is a stage together with its lane (CUDA
stream). If the stage is a schedule, which selects one of several stages by the epoch, there are several."""


def description(stages: Stages, source: Source, decoders: Collection[str] = ()) -> dict[str, Any]:
    """Return the number of ranks, the stages and their decoders as plain values: batches depend on them.

    Args:
        stages: Stages of the loader.
        source: Adapter of the wrapped loader.
        decoders: Keys of the decoders in a saved state. Their versions are included even if no batch has used them yet.
    """
    bound_stages = {id(bound): bound for by_epoch, _ in stages for bound in by_epoch.values()}.values()  # each once
    # A stage that has not run yet returns its decoders only if their keys are required.
    keys = {*decoders, *(key for bound in bound_stages for key in bound.versions(decoders))}
    versions: dict[str, dict[str, None]] = {}  # a dict in place of a set, to keep the order
    for bound in bound_stages:
        for key, text in bound.versions(keys).items():
            versions.setdefault(key, {})[text] = None
    return {
        "ranks": count_ranks() if source.ranks is None else source.ranks,
        "stages": {by_epoch[0].name: definition(stage) for by_epoch, stage in stages},
        **({"decoders": {key: "; ".join(texts) for key, texts in versions.items()}} if versions else {}),
    }


def differences(state: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield the differences between a saved state and the current run.

    A difference is (subject of the sentence that reports it, such as ``The number of ranks``; value in the saved state; value
    in the current run; advice on how to continue as the saved run). Of long text, the values are the parts that differ.

    Args:
        state: The saved state, and under ``"settings"`` the settings of the wrapped loader, such as its batch size.
        current: Values of the current run for the same keys.
    """
    current_values = {name: value for name, value, _ in _compared(current)}
    for name, saved, way_out in _compared(state):
        value = current_values.get(name, "none")
        if saved != value:
            if isinstance(saved, str) and isinstance(value, str):
                saved, value = _first_difference(saved, value)
            yield name, saved, value, way_out


def _compared(state: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield (name, value, advice if the value differs) of the entries of a state that are compared."""
    yield "seed", state["seed"], "Leave seed out to use the seed of the state."
    way_out = "Start as many ranks as in the saved run: the samples of a batch and their random numbers depend on it."
    yield "The number of ranks", state["ranks"], way_out
    for name, value in state["settings"].items():
        yield f"The wrapped loader's {name}", value, "Create the loader with the settings of the saved run."
    way_out = "Pass the stages of the saved run: the random numbers of a stage depend on its name."
    yield "The names of stages", ", ".join(state["stages"]) or "none", way_out
    for name, value in state["stages"].items():
        yield f"Stage {name!r}", value, "Pass the stage of the saved run."
    way_out = "Pixels may differ by a few values; for equal pixels, resume with the decoder that made the checkpoint."
    for name, value in state.get("decoders", {}).items():
        yield f"The decoder of stage {name!r}", value, way_out


def _first_difference(saved: str, current: str) -> tuple[str, str]:
    """Return (saved, current) text of the first argument in which two definitions differ, with the beginning of its line.

    Texts without arguments, such as names, are returned whole.
    """
    lines = [[*text.split("\n"), "nothing"] for text in (saved, current)]
    line = _first_unequal(*lines)
    # A line that ends with an opening bracket is shown with the next line, the first module in the bracket. True counts as 1.
    ends = [line + 1 + text_lines[line].endswith("(") for text_lines in lines]
    shown_lines = ["".join(map(str.strip, text_lines[line:end])) for text_lines, end in zip(lines, ends, strict=True)]
    arguments = [[*re.split(r", (?=\w+=)", text), "nothing"] for text in shown_lines]
    index = _first_unequal(*arguments)
    # The text before the first argument, such as the name of a class.
    begin = arguments[0][0] + (", …, " if index > 1 else ", ") if index else ""
    saved_text, current_text = (f"{begin}{texts[index]}" if texts[index].strip(")") else "nothing" for texts in arguments)
    return saved_text, current_text


def _first_unequal(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the first index at which two sequences differ; 0 if there is none."""
    return next((index for index, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), 0)


def batches_done(state: Mapping[str, Any], current: Mapping[str, Any], *, sharded: bool) -> int:
    """Return the number of batches after which the current run has processed as many samples as the saved run, rounded down.

    Args:
        state: The saved state, and under ``"settings"`` the settings of the wrapped loader.
        current: Values of the current run for the same keys.
        sharded: Whether samplers of the wrapped loader divide the dataset among the ranks.
    """
    batch: int = state["batch"]
    saved_size, current_size = (run["settings"].get("batch_size") for run in (state, current))
    if not (isinstance(saved_size, int) and isinstance(current_size, int) and saved_size > 0 and current_size > 0):
        return batch
    saved_ranks, current_ranks = (run["ranks"] if sharded else 1 for run in (state, current))
    return int(batch * saved_size * saved_ranks // (current_size * current_ranks))
