"""Decoding of one batch: submission to the decoders, collection of the images, and replacement of samples.

A *member* is an entry of a batch. An ``Encoded`` is a member of undecoded images or clips, one per sample. Decoding is
*submitted* when it begins on background threads, and *collected* when the batch is about to be copied to the device, on the
*copy lane* (a CUDA stream). A *window* is the part of an image that is decoded.

A sample that cannot be decoded is replaced by another sample, in all members of the batch. So the ``Decoding`` of each
``DecodeStage`` also replaces the samples that another stage of the loader cannot decode.
"""

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from gpuaug.core.batch import Batch, members_of_type
from gpuaug.core.encoded import Encoded, EncodedClips
from gpuaug.core.errors import DecodeError
from gpuaug.core.ragged import Ragged
from gpuaug.core.rng import Position
from gpuaug.core.streams import Event
from gpuaug.decode.decoder import LAYOUTS, Decoder
from gpuaug.decode.decoders.base import Pools
from gpuaug.decode.hints import DecodedMember
from gpuaug.decode.layout import BatchLayout, Layout, WindowsOf, Work, source_indices
from gpuaug.decode.members import map_instances, with_samples_from
from gpuaug.stages.base import DecodedSamples

MAX_LOGGED_PROBLEMS = 3
"""Maximum number of problems that a log message describes. Further problems are only counted."""

_log = logging.getLogger("gpuaug")


class _Problem(NamedTuple):
    """Reason why a sample cannot be decoded."""

    sample: str
    """Index of the sample in its batch, with its file if that is known."""
    file: str
    """File of the sample, or its index, batch and epoch if the file is not known."""
    reason: str
    """Reason as a clause about the sample, such as "it is empty"."""

    def __str__(self) -> str:
        return f"{self.sample}: {self.reason}"


class DecodingPlaceholder:
    """Placeholder for one ``Encoded`` of a batch while it is being decoded. Its ``.to(device)`` returns the decoded member."""

    __slots__ = ("_number", "count", "decoding")

    def __init__(self, decoding: "Decoding", number: int, count: int) -> None:
        self.decoding = decoding
        self.count = count
        """Number of images or clips."""
        self._number = number  # index of the member in ``Decoding.works``

    @property
    def decoded_member(self) -> DecodedMember:
        """Header fields of the member, and options with which it is decoded."""
        return DecodedMember(self, self.decoding._encoded[self._number].headers, self.decoding._decoder.options)

    def to(self, device: torch.device, non_blocking: bool = False) -> Ragged | Tensor:
        """Return the decoded images or clips.

        The loader calls this method as it calls ``Tensor.to``, with the copy lane current.
        """
        return self.decoding.works[self._number].to(device, non_blocking=non_blocking)


class Decoding:
    """Decoding of the members of one batch that one ``DecodeStage`` decodes. Creating the object submits them.

    Args:
        decoder: Decoder of the stage.
        pools: Threads of the loader's iterator.
        encoded: Members of the batch to decode, with B samples each.
        windows: Function per member that returns the windows to decode; ``None`` to decode whole images.
        earlier: Decodings of other members of the batch, by earlier stages. They are submitted and collected before this one.
            If such a ``Decoding`` also has B samples, a sample that one of the two cannot decode is replaced in the members of
            both.
        max_replaced: Largest share of the samples that may be replaced, between 0 and 1, which the loader checks; ``None`` if
            an image that cannot be decoded is an error.
        position: Epoch and index of the batch, for the names of samples without a file.

    Raises:
        DecodeError: If ``max_replaced`` is ``None``, and the header of an image shows that it cannot be decoded. If no sample
            of the batch can be decoded.
    """

    def __init__(
        self,
        decoder: Decoder,
        pools: Pools,
        encoded: list[Encoded],
        windows: Sequence[WindowsOf | None],
        *,
        earlier: Sequence["Decoding"],
        max_replaced: float | None,
        position: Position,
    ) -> None:
        self._decoder, self._pools, self._encoded, self._windows = decoder, pools, encoded, windows
        self._max_replaced = max_replaced
        self._position = position
        self._count = len(encoded[0])  # number of samples, B
        self._earlier = [decoding for decoding in earlier if decoding._count == self._count]
        self._problems: dict[int, _Problem] = {}
        """Index of each sample that this ``Decoding`` cannot decode → description of the sample and its problem."""
        # These decodings share one dict: a problem of a later decoding also makes the earlier decodings decode another sample.
        # A list of all decodings would be a reference cycle, and the memory of the batch would be freed late.
        self._all_problems: dict[int, _Problem] = self._earlier[0]._all_problems if self._earlier else {}
        """Like ``_problems``, for all decodings whose samples are replaced together: this one and ``_earlier``."""
        self.replaced_samples: Set[int] = set()
        """Indices of the samples that ``collect`` has replaced, without those that an earlier ``Decoding`` has replaced."""
        self.undecoded = 0
        """Number of pixels outside the windows that no ``Decoding`` has counted before. Set by ``collect``.

        If this ``Decoding`` has replaced samples, the number in ``earlier`` has changed, and the change is counted here.
        """
        for member in encoded:
            self._add_problems(member, LAYOUTS.get(type(member), Layout).problems(member.headers, decoder.options))
        self._start()

    @property
    def decoded(self) -> DecodedSamples:
        """Number of samples, and the samples that were replaced. Valid after ``collect``."""
        problems = [self._all_problems[index] for index in sorted(self.replaced_samples)]
        max_replaced = 1.0 if self._max_replaced is None else self._max_replaced
        return DecodedSamples(self._count, len(problems), {problem.file: problem.reason for problem in problems}, max_replaced)

    def done(self) -> bool:
        """Return whether ``collect`` returns without waiting for the decoders."""
        return self._future.done()

    def with_placeholders(self, batch: Batch) -> Batch:
        """Return the batch with a placeholder for each ``Encoded`` of this ``Decoding``."""
        placeholders = {
            id(member): DecodingPlaceholder(self, number, len(member)) for number, member in enumerate(self._encoded)
        }
        return map_instances(lambda member: placeholders.get(id(member), member), Encoded, batch)

    def collect(self, batch: Batch, waiting: Callable[[], AbstractContextManager[None]] = nullcontext) -> Batch:
        """Block until the decoding threads have finished, and make the copy lane, which must be current, wait for their events.

        Args:
            batch: Batch with a placeholder for each ``Encoded`` of this ``Decoding``.
            waiting: Function that returns a context manager around the wait. Not called if the images are decoded already.

        Returns:
            Batch in which samples whose image cannot be decoded are replaced.

        Raises:
            DecodeError: If ``max_replaced`` is ``None``, and an image cannot be decoded. If no sample of the batch can be
                decoded. If a sample cannot be replaced in a member.
        """
        # A problem that one ``Decoding`` finds makes all decodings decode another sample, which may reveal further problems. So
        # the loop waits for all decodings again, until no problem is added.
        problem_count = -1
        while problem_count < len(self._all_problems):
            problem_count = len(self._all_problems)
            for decoding in [*self._earlier, self]:
                decoding._wait_until_decoded(waiting)
        works = [work for decoding in [*self._earlier, self] for work in decoding.works]
        self.undecoded = sum(work.layout.undecoded_pixels for work in works)
        self.undecoded -= sum(decoding.undecoded for decoding in self._earlier)
        replaced_earlier = set[int]().union(*(decoding.replaced_samples for decoding in self._earlier))
        self.replaced_samples = self._all_problems.keys() - replaced_earlier
        if not self.replaced_samples:
            return batch
        placeholder_counts = [placeholder.count for placeholder in members_of_type(DecodingPlaceholder, batch)]
        self._check_counts([*placeholder_counts, *map(len, members_of_type(Encoded, batch))])
        self._log_problems()
        sources = source_indices(self._count, self._all_problems)
        # ``Headers.member`` is not empty only if ``collate_encoded`` has collated samples with several fields.
        are_fields = all(encoded.headers.member for encoded in self._encoded)
        return with_samples_from(sources, batch, DecodingPlaceholder, are_fields=are_fields)

    def abandon(self) -> None:
        """Stop decoding after the current image of each thread, and wait until no decoder writes to memory of this batch."""
        for work in self.works:
            work.is_abandoned = True
        if not self._future.cancel():
            wait([self._future])  # not ``result()``, which would raise an error of the abandoned batch
            self._decoder.settle()

    def _start(self) -> None:
        """Allocate the memory of the batch and submit it to the decoders.

        Raises:
            DecodeError: If ``max_replaced`` is ``None``, and an image cannot be decoded. If no sample of the batch can be
                decoded.
        """
        if self._max_replaced is None and self._problems:
            self._refuse(self._problems, "Leave it out of the dataset, or pass on_error='replace' to the DecodeStage.")
        if self._all_problems and len(self._all_problems) == self._count:
            self._refuse(
                self._all_problems,
                "Leave it out of the dataset: on_error='replace' needs at least one sample per batch that can be decoded.",
            )
        if self._all_problems:
            self._check_counts([len(member) for member in self._encoded])
        self._undecodable = set(self._all_problems)
        """Indices of the samples in whose place this submission decodes another sample."""
        members = zip(self._encoded, self._windows, strict=True)
        self.works: list[Work[BatchLayout]] = []
        """Decoding task of each member, in the order of ``encoded``."""
        for encoded, windows in members:
            try:
                self.works.append(self._decoder.allocate(encoded, self._all_problems, windows))
            except MemoryError as error:
                raise self._allocation_error(encoded, error) from error
        self._future: Future[list[Event]] = self._decoder.start(self._pools, self.works)
        """Result of the decoding threads: events after which all pixels are in device memory."""

    def _allocation_error(self, encoded: Encoded, error: Exception) -> DecodeError:
        """Return the error about a member whose decoded images do not fit into memory."""
        table = encoded.headers.table
        pixels = table["height"].astype(np.float64) * table["width"]
        largest = int(pixels.argmax())
        name = encoded.headers.names[largest]
        size = f"{table['width'][largest]}x{table['height'][largest]}"
        reason = str(error).partition("\n")[0] or type(error).__name__
        return DecodeError(
            f"A batch of images cannot be decoded, because its memory cannot be allocated ({reason}). The largest image is "
            f"sample {largest}{f' ({name})' if name else ''} with {size} pixels. Lower max_bytes or max_pixels of the "
            "DecodeStage, or batch_size of the DataLoader."
        )

    def _check_counts(self, counts: Sequence[int]) -> None:
        """Raise an error if encoded members do not have one entry per sample, so that samples cannot be replaced in them.

        Args:
            counts: Number of images or clips per encoded member.
        """
        other = next((count for count in counts if count != self._count), None)
        if other is not None:
            raise DecodeError(
                f"Sample {min(self._all_problems)} cannot be replaced, because the batch has a member of {self._count} encoded "
                f"files and a member of {other}. Return one file per sample in each member, or pass on_error='raise' to the "
                "DecodeStage."
            )

    def _refuse(self, problems: Mapping[int, "_Problem"], way_out: str) -> NoReturn:
        """Raise the error about the first sample of ``problems``. ``way_out``: last sentence of the message, with advice."""
        first = min(problems)
        others = len(problems) - 1
        more = f" ({others} other sample{'s' if others > 1 else ''} of the batch cannot be decoded either)" if others else ""
        decoding = next((decoding for decoding in self._earlier if first in decoding._problems), self)
        subject = "A clip" if isinstance(decoding._encoded[0], EncodedClips) else "An image"
        raise DecodeError(f"{subject} cannot be decoded, because of {problems[first]}{more}. {way_out}")

    def _wait_until_decoded(self, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        """Wait until the members are decoded, with another sample in place of each sample that has a problem.

        The copy lane waits for the decoders' events. The host blocks, within ``waiting()``, while images are being decoded.
        """
        while True:
            with nullcontext() if self._future.done() else waiting():
                events = self._future.result()
            for event in events:
                self._decoder.copy_lane.wait(event)
            for work in self.works:
                # In place of sample ``index``, sample ``sources[index]`` was decoded, so this is the sample with the problem.
                self._add_problems(
                    work.encoded, {int(work.layout.sources[index]): reason for index, reason in work.problems.items()}
                )
            if self._undecodable == self._all_problems.keys():
                return
            self._start()  # decode all images again: the offset of an image depends on the sizes of all images before it

    def _add_problems(self, encoded: Encoded, reasons: Mapping[int, str]) -> None:
        """Record problems of one member. ``reasons``: index of each image that cannot be decoded → reason."""
        for index, reason in reasons.items():
            name = encoded.headers.names[index]
            file = name or f"sample {index} of batch {self._position.batch} of epoch {self._position.epoch}"
            problem = _Problem(f"sample {index}{f' ({name})' if name else ''}", file, reason)
            self._problems.setdefault(index, problem)
            self._all_problems.setdefault(index, problem)

    def _log_problems(self) -> None:
        """Log the problems of the samples that this ``Decoding`` replaces, each time the stage's number of them has doubled."""
        before = self._decoder.replaced
        self._decoder.replaced += len(self.replaced_samples)
        if self._decoder.replaced.bit_length() == before.bit_length():  # no power of two was reached: not doubled since a log
            return
        first = "; ".join(str(self._all_problems[index]) for index in sorted(self.replaced_samples)[:MAX_LOGGED_PROBLEMS])
        others = len(self.replaced_samples) - MAX_LOGGED_PROBLEMS
        more = f"; and {others} more" if others > 0 else ""
        _log.warning(
            "Samples were replaced because their images or clips cannot be decoded, %d in all. Of this batch: %s%s",
            *(self._decoder.replaced, first, more),
        )
