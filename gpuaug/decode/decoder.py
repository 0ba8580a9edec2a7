"""Decoding of batches on background threads, with several decoders at once. The header of a file alone selects its decoder.

A call to the JPEG engines blocks its thread for milliseconds. One thread makes only these calls, so that the engines never
wait for the interpreter. Other threads prepare batches.

**Memory.** Decoding threads allocate nothing through PyTorch. The training thread allocates on the copy lane, after that lane
has waited for all readers of memory freed there. The engines start at once, without waiting for the CUDA stream of the call.
Therefore a thread waits on the host for the copy lane's event before it decodes into the allocated memory.
"""

import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from gpuaug.core.encoded import Encoded, EncodedClips
from gpuaug.core.errors import GpuAugWarning
from gpuaug.core.streams import Event, Lane, Lanes
from gpuaug.decode import nvjpeg
from gpuaug.decode.clips.layout import ClipLayout, ClipWork
from gpuaug.decode.decoders.base import FileDecoder, Pools, Resources
from gpuaug.decode.layout import Layout, Options, WindowsOf, slab_length
from gpuaug.decode.work import Work, allocated


class Decoder:
    """Decode batches on the lanes of one loader.

    Args:
        name: Name of the stage.
        lanes: Lanes of the loader.
        options: Options of the stage.
        find_images: Function that returns the image decoders, called for the first images. Of these, the first decoder whose
            ``takes`` is true for a file decodes it.
        find_clips: Function that returns the clip decoders, called for the first clips.
    """

    def __init__(
        self,
        name: str,
        lanes: Lanes,
        options: Options,
        find_images: Callable[[], list[FileDecoder]],
        find_clips: Callable[[], list[FileDecoder]] = list,
    ) -> None:
        self._name, self._lanes, self._options = name, lanes, options
        self._find = {Encoded: find_images, EncodedClips: find_clips}
        self.found: dict[type[Encoded], list[FileDecoder]] = {}
        """Decoders of images (``Encoded``) and of clips (``EncodedClips``), set when the first of them arrive."""
        # High priority: otherwise colour conversion waits for the kernels of the training step.
        self._lane: Lane = lanes.lane(f"decode/{name}", urgent=True)
        self._card_lanes = [self._lane]
        self._idle_card_lanes: SimpleQueue[Lane] = SimpleQueue()
        self._idle_card_lanes.put(self._lane)
        self._cannot_lock = False
        self.waited_s: defaultdict[str, float] = defaultdict(float)
        """Seconds spent waiting for each decoder, by name. Approximate: threads add to it without a lock."""
        self._pixels: list[weakref.ref[Tensor]] = []
        """Device buffers of batches that are not freed yet."""
        self._pinned: list[weakref.ref[Tensor]] = []
        """Page-locked buffers of batches that are being decoded."""

    def decoders_of(self, kind: type[Encoded]) -> list[FileDecoder]:
        """Return the decoders of images (``Encoded``) or clips (``EncodedClips``). The first call is on the training thread."""
        if kind not in self.found:
            self.found[kind] = decoders = self._find[kind]()
            # One lane per concurrent call of a decoder on the card.
            for call in range(len(self._card_lanes), sum(decoder.calls for decoder in decoders if decoder.on_card)):
                self._card_lanes.append(self._lanes.lane(f"decode/{self._name}/{call}", urgent=True))
                self._idle_card_lanes.put(self._card_lanes[-1])
        return self.found[kind]

    @property
    def all_decoders(self) -> list[FileDecoder]:
        """All decoders of ``found``."""
        return [decoder for decoders in self.found.values() for decoder in decoders]

    @property
    def pinned_bytes(self) -> int:
        """Page-locked bytes of the batches that are being decoded, and of the decoders."""
        return _bytes(self._pinned) + sum(decoder.held_bytes[0] for decoder in self.all_decoders)

    @property
    def device_bytes(self) -> int:
        """Device bytes of the pixels of batches that are not freed yet, and of the decoders."""
        return _bytes(self._pixels) + sum(decoder.held_bytes[1] for decoder in self.all_decoders)

    def allocate(self, encoded: Encoded, bad: Mapping[int, str], windows: WindowsOf | None = None) -> Work | ClipWork:
        """Allocate the buffers of a batch. Called on the training thread, with the copy lane current."""
        if isinstance(encoded, EncodedClips):
            return self._allocate_clips(encoded, bad)
        layout = Layout(encoded.headers, self._options, self.decoders_of(Encoded), bad=bad, windows=windows)
        data = self._on_device(layout.length, layout.dtype)
        raw = self._on_device(layout.raw_length) if layout.raw_length else None
        staged = layout.staged_length and not self._lanes.in_line
        staging = self._staging(layout.staged_length, layout.dtype) if staged else None
        return Work(encoded, layout, data, raw, staging)

    def _allocate_clips(self, clips: EncodedClips, bad: Mapping[int, str]) -> ClipWork:
        layout = ClipLayout(clips.headers, self._options, self.decoders_of(EncodedClips), bad=bad)
        data = self._on_device(layout.length)
        raw = self._on_device(layout.raw_length) if layout.raw_length else None
        staged = layout.staged_length and not self._lanes.in_line
        return ClipWork(clips, layout, data, raw, self._staging(layout.staged_length, torch.uint8) if staged else None)

    def _on_device(self, length: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        buffer = allocated(slab_length(length * dtype.itemsize), self._lanes.device, dtype)
        self._pixels = [*(reference for reference in self._pixels if reference() is not None), weakref.ref(buffer)]
        return buffer

    def _staging(self, values: int, dtype: torch.dtype) -> Tensor:
        """Return a host buffer for ``values`` values: page-locked, or pageable if page-locking fails."""
        length = values * dtype.itemsize
        host, rounded = torch.device("cpu"), slab_length(length)
        if not self._cannot_lock:
            try:
                buffer = allocated(rounded, host, dtype, pin_memory=True)
            except RuntimeError as error:
                self._cannot_lock = True
                reason = str(error).partition("\n")[0]
                warnings.warn(
                    f"Copies of decoded images make the decoder wait, because {length / 1e6:.1f} MB could not be page-locked "
                    f"({reason}). Lower depth, or batch_size of the DataLoader.",
                    GpuAugWarning,
                    stacklevel=2,
                )
            else:
                self._pinned = [*(reference for reference in self._pinned if reference() is not None), weakref.ref(buffer)]
                return buffer
        return allocated(rounded, host, dtype)

    def start(self, pools: Pools, works: list[Work | ClipWork]) -> Future[list[Event]]:
        """Submit a batch. The future has the decoders' events as its result, or the error of a library or the card."""
        free = self._lanes.copy.record_event()
        return pools.batches.submit(self._decode, pools, works, free)

    def settle(self) -> None:
        """Make the copy lane wait for all decoding queued so far, so that memory freed on that lane can be reused safely."""
        for lane in self._card_lanes:
            self._lanes.copy.wait(lane.record_event())

    def _decode(self, pools: Pools, works: list[Work | ClipWork], free: Event) -> list[Event]:
        if not self._lanes.in_line:
            nvjpeg.enter(self._lanes.device)
        resources = Resources(self._lanes, self._lane, self._idle_card_lanes, pools)
        on_host: list[tuple[str, Callable[[], Event]]] = []
        on_card: list[tuple[str, Callable[[], Event]]] = []
        events: list[Event] = []
        errors: list[BaseException] = []
        try:
            self._begin(works, resources, on_host, on_card=False)
            free.synchronize()
            self._begin(works, resources, on_card, on_card=True)
        except BaseException as error:
            errors.append(error)
        for name, finish in [*on_card, *on_host]:  # all, even after an error: no decoder may write to memory that is reused
            start = time.perf_counter()
            try:
                events.append(finish())
            except BaseException as error:
                errors.append(error)
            self.waited_s[name] += time.perf_counter() - start
        if errors:
            raise errors[0]
        return events

    def _begin(
        self, works: list[Work | ClipWork], resources: Resources, begun: list[tuple[str, Callable[[], Event]]], *, on_card: bool
    ) -> None:
        """Start the decoders on the card, or on the host. Appends (name, function that waits for the decoder) to ``begun``."""
        for work in works:
            decoders = self.decoders_of(type(work.encoded))
            for number, decoder in reversed(list(enumerate(decoders))):  # the hybrid decoder's function decodes, so first
                indices = np.flatnonzero(work.layout.decoders == number)
                if decoder.on_card == on_card and len(indices):
                    begun.append((decoder.name, decoder.begin(work, indices, resources)))


def _bytes(references: list[weakref.ref[Tensor]]) -> int:
    return sum(tensor.nbytes for reference in references if (tensor := reference()) is not None)
