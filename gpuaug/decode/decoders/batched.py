"""Decoders that decode all files of a batch in one call of nvJPEG: by the JPEG engines, or by the card's multiprocessors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gpuaug.core.encoded import Format
from gpuaug.core.streams import Event
from gpuaug.decode import nvjpeg
from gpuaug.decode.decoders.base import FileDecoder, Place
from gpuaug.decode.work import Work

MOST_SIDE = 16384
"""Pixels of the longest side that the JPEG engines support."""

SAMPLINGS = (4 * 1 + 1, 4 * 2 + 1, 4 * 2 + 2, 4 * 1 + 2)
"""Chroma subsamplings that the engines support, in ``HEADER``'s encoding: 4:4:4 or grey, 4:2:2, 4:2:0, 4:4:0."""


class Batched(FileDecoder):
    """nvJPEG's batched call on one device.

    A call takes one of the device's decoding states and returns it when its GPU work is done, so that no more calls run at
    once than there are states, over all loaders of the process.

    Args:
        states: The decoding states. Their number is the number of calls that may run at once.
    """

    backend: ClassVar[int]
    most_calls: ClassVar[int]
    """Number of states that are made for a device."""
    spin: ClassVar[bool]
    """Whether a thread waits busily for the GPU work behind a call: less latency, one core busy."""
    on_card = True
    files = "baseline JPEG in one scan: 4:4:4, 4:2:2, 4:2:0, 4:4:0 or grey, sides of at most 16384 pixels"

    def __init__(self, states: Sequence[nvjpeg.BatchDecoder]) -> None:
        self._parser, self.calls = states[0], len(states)
        self._idle: SimpleQueue[nvjpeg.BatchDecoder] = SimpleQueue()
        for state in states:
            self._idle.put(state)

    @property
    def version(self) -> str:
        """Version of nvJPEG."""
        return f"nvJPEG {self._parser.version}"

    def takes(self, table: NDArray[np.void]) -> NDArray[np.bool_]:
        """(B,) whether each file is a baseline JPEG of a supported sampling and size."""
        taken: NDArray[np.bool_] = (
            (table["format"] == Format.JPEG)
            & np.isin(table["sampling"], SAMPLINGS)
            & (np.maximum(table["height"], table["width"]) <= MOST_SIDE)
        )
        return taken

    def begin(self, work: Work, indices: NDArray[Any], place: Place) -> Callable[[], Event]:
        """Submit a call to a thread that makes such calls alone, so that nvJPEG never waits for the interpreter."""
        return place.pools.card.submit(self._decode, work, self._prepared(work, indices), place).result

    def _prepared(self, work: Work, indices: NDArray[Any]) -> "_Call":
        """Arguments of the call, without the files for which nvJPEG finds another size than their header's."""
        layout = work.layout
        table = layout.headers[indices]
        addresses = (work.encoded.data.data_ptr() + table["start"]).astype(np.uint64)
        lengths = table["length"].astype(np.uint64)
        found = self._parser.sizes(addresses, lengths)
        same = (found == layout.stored[indices]).all(1)
        for index, (height, width) in zip(indices[~same].tolist(), found[~same].tolist(), strict=True):
            stored = layout.stored[index].tolist()
            work.problems[index] = f"nvJPEG finds {width}x{height} pixels and its header {stored[1]}x{stored[0]}"
        indices, addresses, lengths = indices[same], addresses[same], lengths[same]
        outputs = np.zeros(len(indices), nvjpeg.OUTPUT)
        raw = layout.needs_postprocessing[indices]
        outputs["channel"][:, 0] = work.data.data_ptr() + layout.starts[indices]
        if work.raw is not None:
            outputs["channel"][raw, 0] = work.raw.data_ptr() + layout.raw_starts[indices][raw]
        outputs["pitch"][:, 0] = layout.stored[indices, 1] * layout.channels
        return _Call(indices, addresses, lengths, outputs)

    def _decode(self, work: Work, call: "_Call", place: Place) -> Event:
        """Decode a batch; after a failure decode its images one by one, to find the ones that cannot be decoded."""
        if not place.lanes.in_line:
            nvjpeg.enter(place.lanes.device)
        state, lane = self._idle.get(), place.card_lanes.get()
        form = nvjpeg.OUTPUT_RGBI if work.layout.channels == 3 else nvjpeg.OUTPUT_Y

        def status(part: slice) -> int:
            """Status of nvJPEG for a part of the batch, after all GPU work of that call is done."""
            files = call.addresses[part], call.lengths[part]
            found = state.decode(*files, call.outputs[part], form, lane.number)
            # Otherwise its GPU work would overlap with that of the state's next call.
            lane.record_event(spin=self.spin).synchronize()
            return found

        try:
            if len(call.indices) and status(slice(None)):
                for at, index in enumerate(call.indices.tolist()):
                    if found := status(slice(at, at + 1)):
                        work.problems[index] = f"nvJPEG finds: {nvjpeg.STATUS[found]}"
            return lane.record_event()
        finally:
            place.card_lanes.put(lane)
            self._idle.put(state)


class Engines(Batched):
    """The JPEG engines of a data-centre card.

    One call runs at once on a device: concurrent calls deadlocked on an H200 with nvJPEG 13.3, between threads and between
    processes, and were no faster.
    """

    name, backend, most_calls = "engines", nvjpeg.HARDWARE, 1
    spin = True  # colour conversion takes less than 1 ms


class Hybrid(Batched):
    """The multiprocessors of a card, which read the Huffman codes too. For cards without JPEG engines beside few cores.

    On an H200 a call takes about 20 ms however many files of 500x420 pixels it decodes, up to 256, and kernels of a model wait
    for most of that time. Two calls at once decode 1.8 times as many images a second as one.
    """

    name, backend, most_calls = "hybrid", nvjpeg.GPU_HYBRID, 2
    spin = False


@dataclass(slots=True)
class _Call:
    """Arguments of nvJPEG's batched call."""

    indices: NDArray[Any]
    addresses: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    outputs: NDArray[np.void]
