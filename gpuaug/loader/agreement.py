"""Whether a state is of a run like this one: the loader, the stages, the decoders, the seed and the number of ranks."""

import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from gpuaug.core.errors import ArgumentError, shown
from gpuaug.feed.resumable import Position, is_position
from gpuaug.loader.depth import ranks as count_ranks
from gpuaug.stages.base import BoundStage, Stage

WAY_OUT = "Pass what state_dict() of a StreamedLoader returned."

Stages = Sequence[tuple[BoundStage, Stage]]
"""Each on its lane, and as the user made it."""

_MOST_TEXT = 2000  # characters of a stage's definition that a state keeps
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def description(stages: Stages, position: Position | None) -> dict[str, Any]:
    """What batches depend on besides the wrapped loader and the seed, of plain values.

    Args:
        stages: The loader's.
        position: That of the wrapped loader, if it has one.
    """
    ranks = position.ranks if position is not None else None
    decoders = {bound.name: bound.version for bound, _ in stages if bound.version}
    return {
        "ranks": count_ranks() if ranks is None else ranks,
        "stages": {bound.name: definition(stage) for bound, stage in stages},
        **({"decoders": decoders} if decoders else {}),
    }


def definition(stage: Stage) -> str:
    """The arguments of a stage as text, the same in each process. What fills pages is cut, and ends with its checksum."""
    ignored = ("name", "selection", "backend", "capture")  # these change no batch, or are compared by themselves
    own = {name: value for name, value in vars(stage).items() if not name.startswith("_") and name not in ignored}
    arguments = {"on": stage.selection.on, "into": stage.selection.into, **own}
    text = ", ".join(f"{name}={_text(value)}" for name, value in arguments.items() if value is not ...)
    checksum = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}… {checksum}"


def _text(value: Any) -> str:
    if isinstance(getattr(value, "definition", None), str):  # as that of fuse, whose repr is one of a few words
        return str(value.definition)
    if isinstance(value, functools.partial):
        arguments = [_text(value.func), *map(_text, value.args), *(f"{name}={_text(v)}" for name, v in value.keywords.items())]
        return f"partial({', '.join(arguments)})"
    if not isinstance(value, nn.Module | type) and isinstance(getattr(value, "__qualname__", None), str):
        return str(value.__qualname__)
    if not any("__repr__" in vars(kind) for kind in type(value).__mro__[:-1]):
        return type(value).__qualname__  # without its module, which is called __main__ where it is the program
    return _ADDRESS.sub("", repr(value))


def check_source(source: Any, batch: int, loader: Any, position: Position | None) -> None:
    """Check that the wrapped loader's part of a state is of a loader of this kind, before anything acts on it.

    Raises:
        ArgumentError: If it is of another.
    """
    if position is not None and not (position.accepts(source) or (source is None and not batch)):
        raise ArgumentError(f"state['source'] must be that of a {type(loader).__name__}, got {shown(source)}. {WAY_OUT}")
    if position is None and is_position(source):
        raise ArgumentError(
            f"state['source'] must be that of a {type(loader).__name__}, got that of a plain DataLoader or a list. "
            "Wrap such a one."
        )
    if position is None and isinstance(source, Mapping) and hasattr(loader, "snapshot_every_n_steps"):  # of torchdata
        main = source.get("_snapshot", {}).get("_main_snapshot", {})
        workers = main.get("_num_workers", 0) if isinstance(main, Mapping) else 0
        if source and workers != loader.num_workers:
            raise ArgumentError(
                f"num_workers must be {workers}, with which the state was made, got {loader.num_workers}. "
                "A StatefulDataLoader goes on with as many workers as before; a plain DataLoader with any number."
            )


def differences(state: Mapping[str, Any], now: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """What differs between the run of a state and this one, a sentence or two for each.

    Args:
        state: The state.
        now: The same entries of this run.
        settings: What decides the batches of the wrapped loader besides their order, where that is known.
    """
    found = []
    if state["seed"] != now["seed"]:
        found.append(f"seed must be {state['seed']}, as in the state, got {now['seed']}. Leave it out to adopt the state's.")
    if state["ranks"] != now["ranks"]:
        found.append(
            f"The number of ranks must be {state['ranks']}, as in the state, got {now['ranks']}. "
            "Samples of a batch, their order and their draws depend on it."
        )
    before = state["source"]["settings"] if settings else {}
    found += [
        f"The wrapped loader's {name} must be {before.get(name)!r}, as in the state, got {settings.get(name)!r}. "
        "Make the loader as it was made then."
        for name in {**before, **settings}
        if before.get(name) != settings.get(name)
    ]
    stages, own = state["stages"], now["stages"]
    if list(stages) != list(own):
        found.append(
            f"The names of stages must be {', '.join(stages) or 'none'}, as in the state, got {', '.join(own) or 'none'}. "
            "Their draws are keyed by name: give the stages of then."
        )
    for name in own:
        if name in stages and stages[name] != own[name]:
            then, here = _first_difference(stages[name], own[name])
            found.append(f"Stage {name!r} must be as in the state, {then}, got {here}. Give the stage of then.")
    decoders, present = state.get("decoders", {}), now.get("decoders", {})
    return found + [
        f"Stage {name!r} must decode as before to give the same batches, got {present[name]} after {decoders[name]}. "
        "Pixels may differ by a few values; for the same ones, resume with the decoder of then."
        for name in present
        if name in decoders and decoders[name] != present[name]
    ]


def _first_difference(then: str, here: str) -> tuple[str, str]:
    """The first parts of two texts that differ, a line or an argument."""
    split = re.compile(r",? *\n *|, (?=\w+=)")
    some, others = split.split(then), split.split(here)
    pairs = zip([*some, "nothing"], [*others, "nothing"], strict=False)
    return next(((one, two) for one, two in pairs if one != two), (then, here))


def batches_had(state: Mapping[str, Any], now: Mapping[str, Any], settings: Mapping[str, Any], *, sharded: bool) -> int:
    """The number of batches of this run that hold the samples the training loop has had, rounded down.

    Args:
        state: The state.
        now: The same entries of this run.
        settings: Those of the wrapped loader.
        sharded: Whether its samplers divide the dataset among the ranks.
    """
    batch: int = state["batch"]
    then, here = state["source"]["settings"].get("batch_size"), settings.get("batch_size")
    if not (isinstance(then, int) and isinstance(here, int) and here > 0):
        return batch
    ranks_then, ranks_here = (state["ranks"], now["ranks"]) if sharded else (1, 1)
    samples: int = batch * then * ranks_then
    return samples // (here * ranks_here)
