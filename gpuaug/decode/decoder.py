"""Decoding of batches on background threads, with several decoders at once. The header of a file alone selects its decoder.

A *lane* is a CUDA stream with a name. Without CUDA, it is an object with the same methods, whose work runs *in line*, that is,
when it is called. A *card* is a GPU. *Engines* are the JPEG decoding hardware of a card. A *member* is an entry of a batch;
each member of encoded images or clips has a ``Work``, with its buffers. *Staging* memory is host memory for images that the CPU
decodes, from which they are copied to the device.

A call to the engines blocks its thread for milliseconds. One thread makes only these calls, so that the engines never wait for
the interpreter. Other threads prepare batches.

**Memory.** Only the training thread allocates memory through PyTorch, on the copy lane. PyTorch may return memory that was
freed on the copy lane while other lanes still read it. A lane would have to wait for these lanes before it writes, but the
engines wait for no CUDA stream: they write at once. So, for each batch:

1. The training thread makes the copy lane wait for the lanes that may read the memory.
2. It records the *memory event* of the batch on the copy lane. The event happens when all these lanes have finished.
3. A decoding thread waits on the host for the event, before a decoder writes to the memory.
"""

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from gpuaug.core.encoded import Encoded, EncodedClips
from gpuaug.core.errors import GpuAugError, warn
from gpuaug.core.ragged import buffer_length
from gpuaug.core.streams import Event, Lane, Lanes
from gpuaug.decode import nvjpeg
from gpuaug.decode.clips.layout import ClipLayout
from gpuaug.decode.decoders.base import FileDecoder, Pools, Resources
from gpuaug.decode.layout import BatchLayout, Layout, Options, WindowsOf, Work

POISON: int | None = None
"""Byte with which tests fill output buffers before decoding, to detect pixels that were not written; ``None``: no fill.

Package code never sets it.
"""

LAYOUTS: dict[type[Encoded], type[BatchLayout]] = {Encoded: Layout, EncodedClips: ClipLayout}
"""Layout of each type of member. Subclasses of ``Encoded`` that users define have the layout of images."""


class Decoder:
    """Decode batches on the lanes of one loader, by its ``FileDecoder``s: the decoders of image files and clips.

    Args:
        name: Name of the stage.
        lanes: Lanes of the loader.
        options: Options of the stage.
        find: Function that returns the decoders of images (``Encoded``) or clips (``EncodedClips``) in order of precedence. It
            is called when the first batch of this type arrives.
    """

    def __init__(self, name: str, lanes: Lanes, options: Options, find: Callable[[type[Encoded]], list[FileDecoder]]) -> None:
        self._name, self._lanes, self.options = name, lanes, options
        self.copy_lane = lanes.copy
        self._find_decoders = find
        self.decoders_by_type: dict[type[Encoded], list[FileDecoder]] = {}
        """Decoders of images (``Encoded``) and of clips (``EncodedClips``). An entry is set when its first batch arrives."""
        # High priority: otherwise colour conversion waits for the kernels of the training step.
        self._lane: Lane = lanes.lane(f"decode/{name}", urgent=True)
        """Lane for copies of images that the CPU decodes. It is also the first of ``_card_lanes``."""
        self._card_lanes = [self._lane]
        """Lanes for calls of decoders that write to device memory, one per concurrent call."""
        self._idle_card_lanes: SimpleQueue[Lane] = SimpleQueue()  # lanes of ``_card_lanes`` that no call uses
        self._idle_card_lanes.put(self._lane)
        self._pins_staging = not lanes.in_line
        """Whether staging memory is page-locked: not without CUDA, and not after page-locking has failed."""
        self.replaced = 0
        """Number of samples that were replaced because this decoder could not decode them."""
        self.waited_s: defaultdict[str, float] = defaultdict(float)
        """Name of each decoder → seconds that threads have waited for it. Approximate, because threads add without a lock."""
        self._pixels: list[weakref.ref[Tensor]] = []
        """Weak references to device buffers, ``data`` and ``raw`` of ``Work``, that are not freed yet."""
        self._pinned: list[weakref.ref[Tensor]] = []
        """Weak references to page-locked buffers of batches that are being decoded."""

    def decoders_of(self, encoded_type: type[Encoded]) -> list[FileDecoder]:
        """Return the decoders of images (``Encoded``) or clips (``EncodedClips``), in order of precedence.

        The first call for a type must be on the training thread, because it creates lanes.
        """
        if encoded_type not in self.decoders_by_type:
            self.decoders_by_type[encoded_type] = decoders = self._find_decoders(encoded_type)
            # As many lanes as concurrent calls of these decoders. Decoders of images and of clips share the lanes.
            for index in range(len(self._card_lanes), sum(decoder.max_calls for decoder in decoders if decoder.on_card)):
                self._card_lanes.append(self._lanes.lane(f"decode/{self._name}/{index}", urgent=True))
                self._idle_card_lanes.put(self._card_lanes[-1])
        return self.decoders_by_type[encoded_type]

    @property
    def all_decoders(self) -> list[FileDecoder]:
        """Decoders of all types of batches so far."""
        return [decoder for decoders in self.decoders_by_type.values() for decoder in decoders]

    @property
    def held_bytes(self) -> tuple[int, int]:
        """(page-locked bytes, device bytes) of the batches that are being decoded, of pixels, and of the decoders."""
        held = [(_bytes(self._pinned), _bytes(self._pixels)), *(decoder.held_bytes for decoder in self.all_decoders)]
        return sum(pinned for pinned, _ in held), sum(device for _, device in held)

    def allocate(self, encoded: Encoded, undecodable: Collection[int], windows: WindowsOf | None = None) -> Work[BatchLayout]:
        """Allocate the buffers for one member of a batch. Call on the training thread, with the copy lane current.

        Args:
            encoded: Encoded images or clips.
            undecodable: Indices of images that cannot be decoded.
            windows: Function that returns the windows to decode; ``None`` to decode whole images.
        """
        decoders, layout_type = self.decoders_of(type(encoded)), LAYOUTS.get(type(encoded), Layout)
        layout = layout_type(encoded.headers, self.options, decoders, undecodable=undecodable, windows=windows)
        data = self._allocate_on_device(layout.length, layout.dtype)
        raw = self._allocate_on_device(layout.raw_length) if layout.raw_length else None
        needs_staging = layout.staged_length and self._lanes.device.type != "cpu"
        staging = self._allocate_staging(layout.staged_length, layout.dtype) if needs_staging else None
        return Work(encoded, layout, data, raw, staging)

    def _allocate_on_device(self, length: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Return a device buffer for ``length`` values, and drop the references to buffers that are freed."""
        buffer = allocate_pixels(length, self._lanes.device, dtype)
        self._pixels = [*(reference for reference in self._pixels if reference() is not None), weakref.ref(buffer)]
        return buffer

    def _allocate_staging(self, values: int, dtype: torch.dtype) -> Tensor:
        """Return a host buffer for ``values`` values: page-locked, or pageable without CUDA or if page-locking fails."""
        host = torch.device("cpu")
        if self._pins_staging:
            try:
                buffer = allocate_pixels(values, host, dtype, pin_memory=True)
            except HostMemoryError as error:
                self._pins_staging = False
                reason, size_mb = str(error).partition("\n")[0], values * dtype.itemsize / 1e6
                warn(
                    f"Copies of decoded images make the decoder wait, because {size_mb:.1f} MB could not be page-locked "
                    f"({reason}). Lower depth, or batch_size of the DataLoader."
                )
            else:
                self._pinned = [*(reference for reference in self._pinned if reference() is not None), weakref.ref(buffer)]
                return buffer
        return allocate_pixels(values, host, dtype)

    def start(self, pools: Pools, works: list[Work[BatchLayout]]) -> Future[list[Event]]:
        """Start to decode a batch on a thread of ``pools.batches``.

        The result of the future is the list of the decoders' events, or the error of a library or the card.
        """
        memory_event = self.copy_lane.record_event()
        return pools.batches.submit(self._decode, pools, works, memory_event)

    def settle(self) -> None:
        """Make the copy lane wait for all queued decoding, so that memory that was freed on the copy lane can be reused."""
        for lane in self._card_lanes:
            self.copy_lane.wait(lane.record_event())

    def _decode(self, pools: Pools, works: list[Work[BatchLayout]], memory_event: Event) -> list[Event]:
        """Decode a batch. Runs on a thread of ``Pools.batches``.

        Args:
            pools: Threads of the iterator.
            works: Decoding task of each encoded member of the batch.
            memory_event: Event after which the device memory of the batch can be written.

        Returns:
            One event per decoder.
        """
        if not self._lanes.in_line:  # prepare this thread for CUDA calls
            nvjpeg.enter(self._lanes.device)
        resources = Resources(self._lanes, self._lane, self._idle_card_lanes, pools)
        started: list[tuple[str, Callable[[], Event]]] = []  # name of a decoder, and function that waits for it
        events: list[Event] = []
        errors: list[BaseException] = []
        try:
            # Decoders that write to host memory first: they need not wait for the memory event.
            for on_card in (False, True):
                if on_card:
                    memory_event.synchronize()
                for type_ in dict.fromkeys(type(work.encoded) for work in works):
                    works_of_type = [work for work in works if type(work.encoded) is type_]
                    for decoder_index, decoder in enumerate(self.decoders_of(type_)):
                        indices = [np.flatnonzero(work.layout.decoders == decoder_index) for work in works_of_type]
                        tasks = [task for task in zip(works_of_type, indices, strict=True) if len(task[1])]
                        if decoder.on_card == on_card and tasks:
                            started += [(decoder.name, finish) for finish in decoder.begin_all(tasks, resources)]
        except BaseException as error:
            errors.append(error)
        # Wait for all decoders even after an error: memory of the batch may be reused, and then no decoder may write to it.
        # In reverse order: the hybrid decoder (nvJPEG on the CPU and the card) begins only in its ``finish``. The engines come
        # before it: they began in ``begin``, and work in the background meanwhile.
        for name, finish in reversed(started):
            start = time.perf_counter()
            try:
                events.append(finish())
            except BaseException as error:
                errors.append(error)
            self.waited_s[name] += time.perf_counter() - start
        if errors:
            raise errors.pop(0)
        return events


def _bytes(references: list[weakref.ref[Tensor]]) -> int:
    """Return the number of bytes of the tensors that still exist."""
    return sum(tensor.nbytes for reference in references if (tensor := reference()) is not None)


class HostMemoryError(GpuAugError, MemoryError):
    """Host memory cannot be allocated, or cannot be page-locked. Callers add advice to the message."""


def allocate_pixels(length: int, device: torch.device, dtype: torch.dtype = torch.uint8, *, pin_memory: bool = False) -> Tensor:
    """Return a flat tensor for at least ``length`` values of type ``dtype``.

    Raises:
        HostMemoryError: If host memory cannot be allocated or page-locked.
    """
    with torch.inference_mode(False):  # decoding threads run outside of inference mode, and could not write inference tensors
        try:
            data = torch.empty(buffer_length(length * dtype.itemsize), dtype=torch.uint8, device=device, pin_memory=pin_memory)
        except RuntimeError as error:
            is_device_memory = isinstance(error, torch.OutOfMemoryError) and device.type != "cpu"  # the loader adds advice
            # An error from deeper frames was raised by a signal handler, such as torch's handler for dead workers.
            if is_device_memory or getattr(error.__traceback__, "tb_next", None) is not None:
                raise
            raise HostMemoryError(*error.args) from error
        data = data if POISON is None else data.fill_(POISON)
        return data if dtype == torch.uint8 else data.view(dtype)
