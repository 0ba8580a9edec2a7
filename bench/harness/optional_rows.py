"""Rows that some machines cannot run: measured where possible, otherwise listed with the reason."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from gpuaug.benchkit.windows import Variant


class MissingError(Exception):
    """A library is missing or cannot be used on this machine. The message has the reason."""


class PeerError(Exception):
    """An error in the steps of a peer's row."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


@dataclass(frozen=True)
class SkippedRow:
    """Name of a row that is not measured, and the reason."""

    name: str
    reason: str


OptionalRow = Variant | SkippedRow
"""A row to measure, or the reason why it is not measured."""


def peer_row(name: str, device: torch.device, make: Callable[[], Variant], *, needs_gpu: bool = True) -> OptionalRow:
    """Return the row of a peer, which may need a GPU or another library. Its errors skip the row and do not end the suite.

    Args:
        name: Name of the row.
        device: Device of the suite.
        make: Function that returns the row, or raises.
        needs_gpu: Whether the row is skipped on a CPU.
    """
    if needs_gpu and device.type != "cuda":
        return SkippedRow(name, "needs a GPU")
    try:
        variant = make()
    # An error of a peer skips only its row. The result has its text as the reason.
    except Exception as error:
        return SkippedRow(name, reason(error))

    def steps() -> Iterator[int]:
        try:
            yield from variant.steps()
        except Exception as error:
            raise PeerError(name, reason(error)) from error

    return replace(variant, steps=steps)


def reason(error: Exception) -> str:
    """Return the first line of an error's message, preceded by its type unless it is a ``MissingError``."""
    text = str(error) if isinstance(error, MissingError) else f"{type(error).__name__}: {error}"
    return (text.strip().splitlines() or [""])[0]


def select_rows(rows: Sequence[OptionalRow], names: str | None, baselines: Sequence[str]) -> list[OptionalRow]:
    """Return the rows whose names are in ``--rows`` or in ``baselines``. Without ``--rows``: all rows."""
    if names is None:
        return list(rows)
    requested = set(names.split(";"))
    available = [row.name for row in rows]
    if not requested <= set(available):
        raise SystemExit(f"--rows must be among {'; '.join(available)}, got {names}. Leave it out to measure all of them.")
    return [row for row in rows if row.name in requested.union(baselines)]
