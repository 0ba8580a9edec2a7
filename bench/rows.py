"""Rows that not every machine can run: measured where they can be, named with the reason where they cannot."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpuaug.benchkit.windows import Variant

Call = Callable[[], Any]
"""Augments a batch once, or a part of it, and returns what came out."""


class MissingError(Exception):
    """A way that cannot be taken here; its text says why."""


class PeerError(Exception):
    """What a peer's row raised while it was measured."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


@dataclass(frozen=True)
class Skipped:
    """A row that is not measured, and why."""

    name: str
    reason: str


Made = Variant | Skipped
"""What an experiment makes of a row."""


def peer(name: str, device: torch.device, make: Callable[[], Variant], *, needs_gpu: bool = True) -> Made:
    """The row of a way that needs a GPU or another library; no error of its own ends the experiment.

    Args:
        name: Of the row, as ``make`` calls it.
        device: What the experiment runs on.
        make: Makes the row, or raises.
        needs_gpu: Whether there is no such row on a CPU.
    """
    if needs_gpu and device.type != "cuda":
        return Skipped(name, "needs a GPU")
    try:
        variant = make()
    # Whatever a peer raises is the reason why its row is missing, and no reason for the others to be.
    except Exception as error:
        return Skipped(name, reason(error))

    def steps() -> Iterator[int]:
        try:
            yield from variant.steps()
        except Exception as error:
            raise PeerError(name, reason(error)) from error

    return replace(variant, steps=steps)


def reason(error: Exception) -> str:
    """The first line of what an error says, with its type unless it was raised to say just that."""
    text = str(error) if isinstance(error, MissingError) else f"{type(error).__name__}: {error}"
    return (text.strip().splitlines() or [""])[0]


def chosen(made: Sequence[Made], names: str | None, baseline: str) -> list[Made]:
    """Those that ``--rows`` names, and the baseline."""
    if names is None:
        return list(made)
    wanted, known = {baseline, *names.split(";")}, [row.name for row in made]
    if not wanted <= set(known):
        raise SystemExit(f"--rows must be among {'; '.join(known)}, got {names}. Leave it out to measure all of them.")
    return [row for row in made if row.name in wanted]
