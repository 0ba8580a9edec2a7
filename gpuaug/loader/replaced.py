"""``Replaced``: the samples of a loader that could not be decoded and were replaced. Part of the state of the loader."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from gpuaug.core.errors import ArgumentTypeError, DecodeError, shown, whole_number
from gpuaug.stages.base import DecodedSamples

MIN_SAMPLES = 1000
"""Number of decoded samples from which on ``max_replaced``, an argument of ``DecodeStage``, is checked."""

MAX_FILES = 10_000
"""Maximum number of files that are listed, because a state contains the list."""


class Replaced(NamedTuple):
    """Samples of all batches that were handed over, in this run and in the runs that it resumes."""

    samples: int = 0
    """Number of samples of batches that a ``DecodeStage`` has decoded."""
    replaced: int = 0
    """Number of these samples that were replaced."""
    files: dict[str, str] = {}  # noqa: RUF012 - never changed
    """File of each replaced sample, or its position if the file is not known → reason. At most ``MAX_FILES``."""

    def after(self, decoded: Sequence[DecodedSamples]) -> "Replaced":
        """Return the counts and files after another batch.

        Args:
            decoded: Samples that each ``DecodeStage`` has decoded.

        Raises:
            DecodeError: If too many samples were replaced.
        """
        if not decoded:
            return self
        problems = {file: reason for stage in decoded for file, reason in stage.problems.items()}
        result = Replaced(
            self.samples + max(stage.samples for stage in decoded),  # the stages decode images of the same samples
            self.replaced + sum(stage.replaced for stage in decoded),
            dict(islice({**self.files, **problems}.items(), MAX_FILES)) if problems else self.files,
        )
        most = min(stage.max_replaced for stage in decoded)
        if result.samples >= MIN_SAMPLES and result.replaced / result.samples > most:
            file, reason = next(reversed(result.files.items()))
            raise DecodeError(
                f"The loader stops, because {result.replaced} of {result.samples} samples could not be decoded, more than "
                f"max_replaced={most} of the DecodeStage allows. One of them is {file}: {reason}. Check the storage of the "
                "files in stats().replaced_files, or pass a larger max_replaced. Then resume from the last state."
            )
        return result


def replaced_of(state: Mapping[str, Any], way_out: str) -> Replaced:
    """Return the replaced samples in a saved state. A state without a ``DecodeStage`` has no entry.

    Raises:
        ArgumentError, ArgumentTypeError: If the entry is not valid.
    """
    entry = state.get("replaced", {})
    files = entry.get("files", {}) if isinstance(entry, Mapping) else None
    if not isinstance(files, Mapping) or not all(isinstance(text, str) for pair in files.items() for text in pair):
        raise ArgumentTypeError(f"state['replaced'] must be a mapping with numbers and files, got {shown(entry)}. {way_out}")
    samples, replaced = (
        whole_number(f"state['replaced'][{name!r}]", entry.get(name, 0), way_out) for name in ("samples", "replaced")
    )
    return Replaced(samples, replaced, dict(files))
