"""Decodes batches on threads of its own, by several decoders at once. A file's header alone decides which decoder it gets.

A call of the engines blocks its thread for milliseconds. The thread that makes these calls does nothing else, so that the
engines never wait for the interpreter; other threads prepare batches.

**Memory.** Threads allocate nothing through PyTorch. The training thread allocates on the copy lane, after that lane's wait for
all readers of memory freed there. The engines do not wait for the stream that they are given: they begin at once. So a thread
waits on the host for the copy lane's event before it decodes into that memory.
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
    """Decodes on the lanes of one loader.

    Args:
        name: The stage's name.
        lanes: The loader's lanes.
        options: The stage's options.
        find_images: Finds the decoders of images, when the first images arrive. The first that takes a file decodes it.
        find_clips: Finds the decoders of clips, when the first clips arrive.
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
        """The decoders of images once images have arrived, and of clips once clips have."""
        # Beside a training step, colour conversion would otherwise wait behind its kernels.
        self._lane: Lane = lanes.lane(f"decode/{name}", urgent=True)
        self._card_lanes = [self._lane]
        self._idle_card_lanes: SimpleQueue[Lane] = SimpleQueue()
        self._idle_card_lanes.put(self._lane)
        self._cannot_lock = False
        self.waited_s: defaultdict[str, float] = defaultdict(float)
        """Seconds of waiting for each decoder after the one before it had ended. Threads add without a lock: approximate."""
        self._pixels: list[weakref.ref[Tensor]] = []
        """Memory on the device, of batches that are not freed yet."""
        self._pinned: list[weakref.ref[Tensor]] = []
        """Page-locked memory, of batches that are being decoded."""

    def decoders_of(self, kind: type[Encoded]) -> list[FileDecoder]:
        """The decoders of images (``Encoded``) or of clips (``EncodedClips``). Called on the training thread at first."""
        if kind not in self.found:
            self.found[kind] = found = self._find[kind]()
            # A lane for each concurrent call of a decoder of the card.
            for call in range(len(self._card_lanes), sum(each.calls for each in found if each.on_card)):
                self._card_lanes.append(self._lanes.lane(f"decode/{self._name}/{call}", urgent=True))
                self._idle_card_lanes.put(self._card_lanes[-1])
        return self.found[kind]

    @property
    def all_decoders(self) -> list[FileDecoder]:
        """The decoders that have been found."""
        return [each for found in self.found.values() for each in found]

    @property
    def pinned_bytes(self) -> int:
        """Page-locked bytes of batches that are being decoded, and of decoders."""
        return _bytes(self._pinned) + sum(each.held_bytes[0] for each in self.all_decoders)

    @property
    def device_bytes(self) -> int:
        """Bytes on the device for pixels, of batches that have not been freed, and of decoders."""
        return _bytes(self._pixels) + sum(each.held_bytes[1] for each in self.all_decoders)

    def allocate(self, encoded: Encoded, bad: Mapping[int, str], windows: WindowsOf | None = None) -> Work | ClipWork:
        """Allocate memory for a batch. Called on the training thread, with the copy lane current."""
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
        made = allocated(slab_length(length * dtype.itemsize), self._lanes.device, dtype)
        self._pixels = [*(each for each in self._pixels if each() is not None), weakref.ref(made)]
        return made

    def _staging(self, values: int, dtype: torch.dtype) -> Tensor:
        """Host memory, page-locked unless that cannot be had."""
        length = values * dtype.itemsize
        host, rounded = torch.device("cpu"), slab_length(length)
        if not self._cannot_lock:
            try:
                made = allocated(rounded, host, dtype, pin_memory=True)
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
                self._pinned = [*(each for each in self._pinned if each() is not None), weakref.ref(made)]
                return made
        return allocated(rounded, host, dtype)

    def start(self, pools: Pools, works: list[Work | ClipWork]) -> Future[list[Event]]:
        """Submit a batch. The future's result is the decoders' events; its exception, an error of a library or the card."""
        free = self._lanes.copy.record_event()
        return pools.batches.submit(self._decode, pools, works, free)

    def settle(self) -> None:
        """Make the copy lane wait for all decoding queued so far. Memory freed on that lane can then be reused safely."""
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
        for name, finish in [*on_card, *on_host]:  # all, also after an error: none may write to memory that is used again
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
        """Begin decoders, and add the name of each and a function that waits for it to ``begun``."""
        for work in works:
            decoders = self.decoders_of(type(work.encoded))
            for number, decoder in reversed(list(enumerate(decoders))):  # the hybrid decoder's function decodes, so first
                indices = np.flatnonzero(work.layout.decoders == number)
                if decoder.on_card == on_card and len(indices):
                    begun.append((decoder.name, decoder.begin(work, indices, resources)))


def _bytes(references: list[weakref.ref[Tensor]]) -> int:
    return sum(each.nbytes for reference in references if (each := reference()) is not None)
