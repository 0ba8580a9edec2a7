"""The JPEG engines of a data-centre card: they decode all baseline JPEGs of a batch in one call of nvJPEG."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug.core.encoded import Format
from gpuaug.core.streams import Event
from gpuaug.decode import nvjpeg
from gpuaug.decode.decoders.base import FileDecoder, Resources
from gpuaug.decode.work import Work

MOST_SIDE = 16384
"""Pixels of the longest side that the JPEG engines support."""

SAMPLINGS = (4 * 1 + 1, 4 * 2 + 1, 4 * 2 + 2, 4 * 1 + 2)
"""Chroma subsamplings that the engines support, in ``HEADER``'s encoding: 4:4:4 or grey, 4:2:2, 4:2:0, 4:4:0."""


def fits_nvjpeg(table: NDArray[np.void]) -> NDArray[np.bool_]:
    """(B,) whether nvJPEG decodes JPEGs of this sampling and size."""
    fits: NDArray[np.bool_] = np.isin(table["sampling"], SAMPLINGS)
    fits &= np.maximum(table["height"], table["width"]) <= MOST_SIDE
    return fits


class Engines(FileDecoder):
    """The JPEG engines of one device.

    One call runs at once on a device, over all loaders of the process: concurrent calls deadlocked on an H200 with nvJPEG 13.3,
    between threads and between processes, and were no faster. The device's lock is held until the call's GPU work is done.

    Args:
        device: A CUDA device.

    Raises:
        NvJpegError: If the device has no engines, or nvJPEG cannot be set up.
    """

    name, on_card = "engines", True
    files = "baseline JPEG in one scan: 4:4:4, 4:2:2, 4:2:0, 4:4:0 or grey, sides of at most 16384 pixels"

    def __init__(self, device: torch.device) -> None:
        self._state, self._turn = nvjpeg.BatchDecoder(device), threading.Lock()

    @property
    def version(self) -> str:
        """Version of nvJPEG."""
        return f"nvJPEG {self._state.version}"

    def takes(self, table: NDArray[np.void]) -> NDArray[np.bool_]:
        """(B,) whether each file is a baseline JPEG of a supported sampling and size."""
        taken = fits_nvjpeg(table)
        taken &= table["format"] == Format.JPEG
        return taken

    def begin(self, work: Work, indices: NDArray[Any], resources: Resources) -> Callable[[], Event]:
        """Submit a call to the thread that makes these calls alone, so that the engines never wait for the interpreter."""
        call = self._prepared(work, indices)
        try:
            return resources.pools.card.submit(self._decode, work, call, resources).result
        except RuntimeError:  # no thread can be started: one that starts later must not write to memory that is used again
            call.indices = call.indices[:0]
            raise

    def _prepared(self, work: Work, indices: NDArray[Any]) -> "_Call":
        """Arguments of the call, without the files for which nvJPEG finds another size than their header's."""
        layout = work.layout
        table = layout.headers[indices]
        addresses = (work.encoded.data.data_ptr() + table["start"]).astype(np.uint64)
        lengths = table["length"].astype(np.uint64)
        found = self._state.sizes(addresses, lengths)
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

    def _decode(self, work: Work, call: "_Call", resources: Resources) -> Event:
        """Decode a batch; after a failure decode its halves, and theirs, to find the images that cannot be decoded."""
        nvjpeg.enter(resources.lanes.device)
        form = nvjpeg.OUTPUT_RGBI if work.layout.channels == 3 else nvjpeg.OUTPUT_Y
        parts = [slice(0, len(call.indices))] if len(call.indices) else []
        with self._turn:
            lane = resources.card_lanes.get()
            try:
                while parts:
                    part = parts.pop()
                    files = call.addresses[part], call.lengths[part]
                    status = self._state.decode(*files, call.outputs[part], form, lane.number)
                    # Otherwise its GPU work, colour conversion of less than 1 ms, would overlap with the next call's.
                    lane.record_event(spin=True).synchronize()
                    if status and part.stop - part.start == 1:
                        work.problems[int(call.indices[part.start])] = f"nvJPEG finds: {nvjpeg.STATUS[status]}"
                    elif status:
                        middle = (part.start + part.stop) // 2
                        parts += [slice(part.start, middle), slice(middle, part.stop)]
                return lane.record_event()
            finally:
                resources.card_lanes.put(lane)


@dataclass(slots=True)
class _Call:
    """Arguments of nvJPEG's batched call."""

    indices: NDArray[Any]
    addresses: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    outputs: NDArray[np.void]
