"""Rows that some machines cannot run: measured where possible, otherwise listed with the reason."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from gpuaug.benchkit.windows import Variant


class MissingError(Exception):
    """A library is missing or cannot be used here; the text says why."""


class PeerError(Exception):
    """An error that the row of a peer raised while it was measured."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


@dataclass(frozen=True)
class Skipped:
    """A row that is not measured, and why."""

    name: str
    reason: str


OptionalRow = Variant | Skipped
"""A row to measure, or the reason why it is not."""


def peer_row(name: str, device: torch.device, make: Callable[[], Variant], *, needs_gpu: bool = True) -> OptionalRow:
    """The row of a peer, which may need a GPU or another library. Its errors do not end the suite.

    Args:
        name: Name of the row that ``make`` makes.
        device: The suite's device.
        make: Makes the row, or raises.
        needs_gpu: Whether the row is skipped on a CPU.
    """
    if needs_gpu and device.type != "cuda":
        return Skipped(name, "needs a GPU")
    try:
        variant = make()
    # Any error of a peer skips its row only, and is the reason in the result.
    except Exception as error:
        return Skipped(name, reason(error))

    def steps() -> Iterator[int]:
        try:
            yield from variant.steps()
        except Exception as error:
            raise PeerError(name, reason(error)) from error

    return replace(variant, steps=steps)


def reason(error: Exception) -> str:
    """The first line of an error's text, with its type unless it is a ``MissingError``."""
    text = str(error) if isinstance(error, MissingError) else f"{type(error).__name__}: {error}"
    return (text.strip().splitlines() or [""])[0]


def select_rows(rows: Sequence[OptionalRow], names: str | None, baselines: Sequence[str]) -> list[OptionalRow]:
    """The rows that ``--rows`` names, and those among ``baselines``."""
    if names is None:
        return list(rows)
    wanted = set(names.split(";"))
    known = [row.name for row in rows]
    if not wanted <= set(known):
        raise SystemExit(f"--rows must be among {'; '.join(known)}, got {names}. Leave it out to measure all of them.")
    return [row for row in rows if row.name in wanted.union(baselines)]
