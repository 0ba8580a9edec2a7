"""Who looks on while batches are made: nobody but profilers, unless somebody takes this one's place."""

from contextlib import AbstractContextManager
from typing import Any

from gpuaug.core.streams import Lane, span


class Hooks:
    """Names ranges for profilers, which cost nothing while none listens."""

    def span(self, name: str, batch: int, lane: Lane | None = None, *, waits: bool = False) -> AbstractContextManager[Any]:
        """A block of work on ``batch``: on the training thread, and on ``lane`` if it queues something there."""
        return span(name)

    def pulled(self, batch: int, began_s: float, ended_s: float) -> None:
        """The wrapped loader made ``batch`` between two times of ``time.perf_counter``."""

    def held_back(self, batch: int, waited_s: float) -> None:
        """The training thread has just waited so long for the device, to which it was too far ahead."""

    def asked(self, consumer: Lane) -> None:
        """The training loop asks for its next batch, so it has queued all of its step."""

    def handed_over(self, batch: int, consumer: Lane) -> None:
        """The training loop is given ``batch``."""
