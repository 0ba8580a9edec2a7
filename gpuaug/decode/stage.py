"""``DecodeStage``: decode images and clips onto the device, ahead of the other stages.

The stage holds the user's arguments. ``BoundDecode`` runs it on the *lanes* of a loader, which are CUDA streams with a name,
and submits a ``Decoding`` per batch. The batch then has a placeholder for each ``Encoded`` member, until the loader collects
the decoded images.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from gpuaug.core import batch as batches
from gpuaug.core import devices
from gpuaug.core.batch import Batch
from gpuaug.core.encoded import Encoded, EncodedClips
from gpuaug.core.errors import (
    ArgumentError,
    ArgumentTypeError,
    DecodeError,
    SelectionError,
    flag,
    one_of,
    shown,
    whole_number,
)
from gpuaug.core.machine import allowed_cores, local_ranks
from gpuaug.core.ragged import Ragged, Shapes, Windows
from gpuaug.core.rng import Position
from gpuaug.core.streams import Event, Lanes
from gpuaug.decode.clips.layout import ClipWork
from gpuaug.decode.clips.layout import problems as clip_problems
from gpuaug.decode.decoder import Decoder
from gpuaug.decode.decoders import registry
from gpuaug.decode.decoders.base import Pools
from gpuaug.decode.decoders.hybrid import LARGE_THREADS
from gpuaug.decode.layout import Options, WindowsOf, problems, source_indices
from gpuaug.decode.members import instances, map_instances, with_samples_from
from gpuaug.decode.work import Work
from gpuaug.stages.base import BoundStage, Stage
from gpuaug.stages.selection import On

MAX_PIXELS = 178_956_970
"""PIL's limit on the number of pixels of an image, above which it warns of a decompression bomb: 13 377 x 13 377."""

MAX_THREADS = 4096
"""Maximum number of threads that decode on the CPU, far above any number of cores."""

CORES_PER_SPARE_CORE = 8
"""One in this number of cores is left to other threads and the workers. The other cores decode.

With as many threads as cores, a thread that holds the interpreter's lock may lose its core, and all others wait: 12, 14 and 16
threads on 16 cores decoded 8,300, 9,000 and 8,200 images/s without engines and without Numba's loops (H200, 2026-11-26).
"""

MAX_LOGGED_PROBLEMS = 3
"""Maximum number of problems that a log message describes. The message counts the others."""

_log = logging.getLogger("gpuaug")


class DecodeStage(Stage):
    """Decode the ``Encoded`` images of a batch into a ``Ragged``, or its clips into frames, on the device.

    The stage decodes ahead of all other stages, on background threads, regardless of its position in ``stages``. The JPEG
    engines of a data-centre card (A100, H100, H200, B200) decode baseline JPEGs. Host threads and the card together decode
    progressive JPEGs, a share of the JPEGs with over 4 megapixels, and all baseline JPEGs on a card without engines. Host
    threads decode all other files, and all files without a GPU. ``print(DecodeStage().decoders)`` lists the files per decoder.

    Clips of ``read_clip`` become a tensor (B, T, 3, H, W) uint8, or a ``Ragged`` of B·T frames if clips differ in size. The
    video engines of a card (``nvdec``) decode H.264, HEVC, VP9 and, if the card has an engine for it, AV1, in 4:2:0 of 8 bits;
    host threads (``pyav``) decode all other clips.

    Args:
        on: Members of the batch to decode: a selector, or several. Default: every ``Encoded``.
        backend: ``"auto"``: all available decoders: engines, hybrid (host threads and the card together) and CPU.
            ``"engines"``, ``"hybrid"``: this decoder and the CPU; an error if it is not available. ``"nvdec"``: the same for
            clips; images are decoded on the CPU. ``"cpu"``: host threads only. The decoder of an image or a clip depends only
            on its header and its length; on a card with engines, for JPEGs of over 4 megapixels, also on ``threads``.
        channels: Channels of the decoded images: 3 for RGB, 1 for grey. ``None``: as stored, with 8 or 16 bits and any number
            of bands. Bits and bands must be the same for all images of a batch.
        min_side: Decode JPEGs at the smallest of 1/1, 1/2, 1/4 and 1/8 of their size at which the short side has at least this
            many pixels. Lossless JPEGs and other formats are decoded at full size.
        scale: ``"auto"``: decode the crop window of the following fused stage at the smallest of 1/1, 1/2, 1/4 and 1/8 of its
            size that is not smaller than the size to which the stage resizes it. Applies to JPEGs that the CPU decodes, if the
            fused stage transforms only images. Pixels then differ from the pixels at full resolution. Default: full resolution.
        exif: Whether images are rotated upright by the orientation in their EXIF, or in XMP if EXIF has none, as PIL's
            ``exif_transpose`` does, before all stages. ``False``: images of all formats are decoded as stored.
        on_error: If an image cannot be decoded: ``"raise"``: raise an error at its batch. ``"replace"``: replace its sample, in
            every member of the batch, by the nearest good sample before it, cyclically. ``stats()`` counts replaced samples,
            and a log message names the first.
        max_pixels: Images with more pixels are treated as images that cannot be decoded, because their header may be wrong.
        threads: Number of threads that decode on the CPU. Default: seven eighths of the cores that this process may use,
            within its affinity and its container's CPU quota, divided by ``LOCAL_WORLD_SIZE``, the machine's number of ranks.
        name: Name of the stage in errors and traces.

    Raises:
        ArgumentError, ArgumentTypeError: If an argument has an invalid value.
        DeviceError: If ``backend`` names a decoder that cannot be used on the loader's device.
        DecodeError: In iteration, if an image cannot be decoded; with ``on_error="replace"``, if no image of a batch can be.

    Warns:
        GpuAugWarning: If the host decodes all images or all clips for a GPU, because nvJPEG or PyNvVideoCodec is not installed
            for torch's CUDA or cannot be set up. Also if the streams of the process share too few hardware queues.

    Cost:
        The training thread allocates the memory for the pixels of a batch. On an H200 the engines decode about 40 000 images of
        500x420 pixels per second (``bench run files``). Device memory: the pixels of up to ``depth + 7`` batches, each rounded
        up by at most an eighth.

        For clips, 12 threads feed the video engines. Each has up to 3 open sessions, one per codec and size, and closes the
        least recently used. A session takes 5 MB for 340x256 and 36 MB for 1280x720 (H.264, H100), plus about 40 frames of 1.5
        bytes per pixel. A batch takes another 1.5 bytes per pixel while it is decoded. Sessions belong to a device, and stay
        open for later loaders. A loader on an H200 decodes 242 clips per second
        (``bench run clips_files``): 16 frames of 340x256 per clip, every fourth frame.

    Examples:
        >>> import io, PIL.Image
        >>> file = io.BytesIO()
        >>> PIL.Image.new("RGB", (6, 4), "red").save(file, "PNG")
        >>> loader = [collate_encoded([(file.getvalue(), 7)])]
        >>> [(images[0].shape, labels.tolist()) for images, labels in StreamedLoader(loader, [DecodeStage()], device="cpu")]
        [(torch.Size([3, 4, 6]), [7])]
    """

    kind = "decode"

    def __init__(
        self,
        *,
        on: On = ...,
        backend: Literal["auto", "engines", "hybrid", "nvdec", "cpu"] = "auto",
        channels: Literal[1, 3] | None = 3,
        min_side: int | None = None,
        scale: Literal["auto"] | None = None,
        exif: bool = True,
        on_error: Literal["raise", "replace"] = "raise",
        max_pixels: int = MAX_PIXELS,
        threads: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(on=on, into=..., name=name)
        self.backend: registry.Backend = one_of(
            "backend", backend, ("auto", "engines", "hybrid", "nvdec", "cpu"), "Leave it out to use all decoders."
        )
        self.on_error = one_of("on_error", on_error, ("raise", "replace"), "Leave it out to raise an error.")
        channels = one_of("channels", channels, (1, 3, None), "Leave it out for RGB.")
        exif = flag("exif", exif, "Leave it out to rotate images upright.")
        if min_side is not None:
            min_side = whole_number("min_side", min_side, "Leave it out to decode whole images.", least=1)
        scale = one_of("scale", scale, ("auto", None), "Leave it out to decode at full resolution.")
        if scale is not None and min_side is not None:
            raise ArgumentError(f"min_side must be left out with scale='auto', got {min_side}. Leave out min_side or scale.")
        max_pixels = whole_number("max_pixels", max_pixels, "Leave it out for PIL's own limit.", least=1)
        if threads is not None:
            threads = whole_number("threads", threads, "Leave it out for 7/8 of the cores.", least=1, most=MAX_THREADS)
        self.threads = threads
        self.options = Options(channels, min_side, exif, max_pixels, scales_windows=scale is not None)

    def __repr__(self) -> str:
        return f"DecodeStage(backend={self.backend!r}, on_error={self.on_error!r})"

    @property
    def decoders(self) -> registry.DecoderTable:
        """Printable table of decoders for this machine's accelerator: files of each, or the reason why it is not used.

        Raises:
            DeviceError: If ``backend`` names a decoder that cannot be used.

        Cost:
            Sets up nvJPEG for the device once per process: about one second.

        Examples:
            >>> DecodeStage(backend="cpu").decoders["engines"].words
            "backend='cpu'"
        """
        device = devices.resolve(None)
        return registry.DecoderTable({**registry.find(self.backend, device), **registry.find_clips(self.backend, device)})

    def __call__(self, encoded: Encoded, device: torch.device | str | int | None = None) -> Ragged | Tensor:
        """Decode one batch without a loader.

        Args:
            encoded: Member of a batch from ``collate_encoded``.
            device: Device of the decoded images. Default: this machine's accelerator, or the CPU without one.

        Returns:
            Ragged images, or a tensor (B, T, 3, H, W) of clips, ready on the current stream.

        Raises:
            ArgumentTypeError: If ``encoded`` is not an ``Encoded``.
            DecodeError: As in a loader.

        Cost:
            Starts threads for each call, in about 5 ms. The first call per process sets up nvJPEG: about one second.
        """
        if not isinstance(encoded, Encoded):
            advice = "Pass a member of a batch that gpuaug.collate_encoded returned."
            raise ArgumentTypeError(f"encoded must be a gpuaug.Encoded, got {shown(encoded)}. {advice}")
        lanes = Lanes(devices.resolve(device))
        bound, iterator_state = self.bind(self.kind, lanes), dict[str, Any]()
        consumer = lanes.consumer()
        try:
            with lanes.launching(consumer):
                lanes.copy.make_current()
                lanes.wait_for_consumers(consumer, consumer.record_event())
                batch, pending = bound.submit(encoded, iterator_state, Position(0, 0, 0, 0), ())
                assert pending is not None
                result: Ragged | Tensor = pending.collect(batch).to(lanes.device)
                ready = lanes.copy.record_event()
            consumer.wait(ready)
            for tensor in (result.data, result.places) if isinstance(result, Ragged) else (result,):
                consumer.reads(tensor)  # the copy lane allocated it, and must not reuse its memory before it has been read
            return result
        finally:
            bound.close(iterator_state)

    def bind(self, name: str, lanes: Lanes) -> "BoundDecode":
        """Prepare to run on the lanes of one loader."""
        return BoundDecode(name, self, lanes)


class BoundDecode(BoundStage):
    """``DecodeStage`` on the lanes of one loader."""

    max_submitted = 2
    """Number of batches that may be decoding in addition to the ``depth`` batches whose stages are queued on the device."""

    def __init__(self, name: str, stage: DecodeStage, lanes: Lanes) -> None:
        super().__init__(name, stage.selection, lanes)
        self.stage, self.lanes = stage, lanes
        find_images, find_clips = (partial(find, stage.backend, lanes.device) for find in (registry.find, registry.find_clips))
        usable = registry.usable
        divides = self.threads >= LARGE_THREADS
        finders = (lambda: usable(find_images())), (lambda: usable(find_clips()))
        self.decoder = Decoder(name, lanes, stage.options, *finders, divides_large_files=divides)
        # The user has named a decoder: raise an error now if it cannot be used.
        if stage.backend in ("engines", "hybrid"):
            self.decoder.decoders_of(Encoded)
        elif stage.backend == "nvdec":
            self.decoder.decoders_of(EncodedClips)

    def versions(self, required_keys: Collection[str] = ()) -> dict[str, str]:
        """Return the names and versions of the decoders as text, for the state of a loader.

        The key for the decoders of images is the name of the stage, and for the decoders of clips ``"<name>, clips"``. A key is
        missing if no batch has needed its decoders, unless it is in ``required_keys``.
        """
        keys = {Encoded: self.name, EncodedClips: f"{self.name}, clips"}
        return {
            key: "; ".join(f"{decoder.name}: {decoder.version}" for decoder in self.decoder.decoders_of(encoded_type))
            for encoded_type, key in keys.items()
            if encoded_type in self.decoder.decoders_by_type or key in required_keys
        }

    @property
    def threads(self) -> int:
        """Number of threads that decode on the CPU."""
        cores = max(allowed_cores() // local_ranks(), 1)
        return self.stage.threads or cores - (cores + CORES_PER_SPARE_CORE // 2) // CORES_PER_SPARE_CORE

    def submit(
        self, batch: Batch, iterator_state: dict[str, Any], position: Position, stages: Sequence[BoundStage]
    ) -> tuple[Batch, "Decoding | None"]:
        """Start to decode the images of a batch, and replace each ``Encoded`` by a placeholder for the decoded images.

        If the first stage that reads an ``Encoded`` crops its images, only the crop windows are decoded.

        Args:
            batch: Host batch.
            iterator_state: Objects of one iterator, by name of the stage. The stage stores its threads there.
            position: Seed, epoch, rank and index of the batch, on which the crops depend.
            stages: All stages of the loader, in order.

        Raises:
            SelectionError: If the batch has no encoded images.
        """
        selected = batch if self._selection.on in (..., None) else self._selection.read(batch)
        members = {id(leaf): leaf for leaf in instances(Encoded, selected)}
        if not members:
            raise SelectionError(
                f"on must name encoded images in the batch, got {_type_names(selected)}. Pass "
                "collate_fn=gpuaug.collate_encoded to the DataLoader, or leave the DecodeStage out."
            )
        if self.name not in iterator_state:
            iterator_state[self.name] = Pools(self.threads)
        encoded = list(members.values())
        windows = [partial(self._windows, member, batch, position, stages) for member in encoded]
        decoding = Decoding(self, encoded, windows, iterator_state[self.name])
        return decoding.with_placeholders(batch), decoding

    def _windows(
        self, encoded: Encoded, batch: Batch, position: Position, stages: Sequence[BoundStage], shapes: Shapes
    ) -> Windows | None:
        """Return the windows that are needed by the first stage that reads ``encoded``; ``None`` for whole images.

        Args:
            encoded: Encoded images.
            batch: Host batch that contains ``encoded``.
            position: Seed, epoch, rank and index of the batch.
            stages: All stages of the loader, in order.
            shapes: Sizes of the decoded images.
        """
        if sum(member is encoded for member in instances(Encoded, batch)) > 1:
            return None  # other occurrences of the member are not cropped
        for stage in stages:
            if isinstance(stage, BoundDecode):
                continue
            try:
                values = stage.selected(batch)
            except SelectionError:  # the stage reads a member that an earlier stage adds
                return None
            if any(member is encoded for member in instances(Encoded, values)):
                return stage.windows(batch, encoded, shapes, position)
        return None

    def read(self, batch: Batch) -> tuple[Any, ...]:
        """Return an empty tuple: the images are decoded before the batch is copied."""
        return ()

    def write(self, batch: Batch, result: Any) -> Batch:
        """Return the batch unchanged."""
        return batch

    def run(self, values: tuple[Any, ...], ready: Event, position: Position, iterator_state: dict[str, Any]) -> None:
        """Do nothing: the images are decoded already."""

    @property
    def pinned_bytes(self) -> int:
        """Page-locked bytes of the images that the CPU decodes, and of the decoders."""
        return self.decoder.pinned_bytes

    @property
    def decode_bytes(self) -> int:
        """Device bytes of the decoded pixels of batches that are not freed yet, and of the decoders."""
        return self.decoder.device_bytes

    def close(self, iterator_state: dict[str, Any]) -> None:
        """End the threads of an iterator."""
        if self.name in iterator_state:
            iterator_state.pop(self.name).close()
            self.decoder.settle()


class DecodingPlaceholder:
    """Placeholder for one ``Encoded`` member while it is being decoded. Its ``.to(device)`` returns the decoded ``Ragged``."""

    __slots__ = ("_decoding", "_number")

    def __init__(self, decoding: "Decoding", number: int) -> None:
        self._decoding = decoding
        self._number = number  # index of the member in ``Decoding.works``

    def to(self, device: torch.device, non_blocking: bool = False) -> Ragged | Tensor:
        """Return the decoded images or clips.

        The loader calls this method as it calls ``Tensor.to``, with the copy lane current.
        """
        return self._decoding.works[self._number].to(device, non_blocking=non_blocking)


class Decoding:
    """Decoding of one batch, from submission to collection.

    Args:
        bound: Stage on the lanes of the loader.
        encoded: Encoded members of the batch.
        windows: Function for each member that returns the windows to decode.
        pools: Threads of the iterator.
    """

    def __init__(self, bound: BoundDecode, encoded: list[Encoded], windows: Sequence[WindowsOf], pools: Pools) -> None:
        self._bound, self._encoded, self._windows, self._pools = bound, encoded, windows, pools
        self._problems: dict[int, str] = {}
        """Index of each sample that cannot be decoded → description of the sample and its problem."""
        self.replaced = 0
        """Number of samples that were replaced by another sample of the batch."""
        self.undecoded = 0
        """Number of pixels of the images outside the decoded windows."""
        for member in encoded:
            options = bound.stage.options
            reasons = (
                clip_problems(member.headers, options)
                if isinstance(member, EncodedClips)
                else problems(member.headers, options)
            )
            self._add_problems(member, reasons)
        self._start()

    def done(self) -> bool:
        """Return whether ``collect`` returns without waiting for the decoders."""
        return self._future.done()

    def with_placeholders(self, batch: Batch) -> Batch:
        """Return the batch with a placeholder for each ``Encoded``."""
        numbers = {id(member): number for number, member in enumerate(self._encoded)}
        return map_instances(
            lambda member: DecodingPlaceholder(self, numbers[id(member)]) if id(member) in numbers else member, Encoded, batch
        )

    def collect(self, batch: Batch, waiting: Callable[[], AbstractContextManager[None]] = nullcontext) -> Batch:
        """Block until the decoding threads have finished, and make the copy lane, which must be current, wait for their events.

        Args:
            batch: Batch with a placeholder for each ``Encoded``.
            waiting: Function that returns a context manager around the wait. Not called if the images are decoded already.

        Returns:
            Batch in which samples whose image cannot be decoded are replaced.

        Raises:
            DecodeError: If an image cannot be decoded, and ``on_error`` is ``"raise"`` or no image of the batch can be.
        """
        self._wait_for_decoders(waiting)
        while any(work.problems for work in self.works):
            for work in self.works:
                self._add_problems(
                    work.encoded, {int(work.layout.sources[index]): reason for index, reason in work.problems.items()}
                )
            self._start()  # decode all images again: the offset of an image depends on the sizes of all images before it
            self._wait_for_decoders(waiting)
        if not self._problems:
            return batch
        self.replaced = len(self._problems)
        self._log_problems()
        sources = source_indices(len(self._encoded[0]), self._problems)
        are_fields = all(encoded.headers.member for encoded in self._encoded)
        return with_samples_from(sources, batch, DecodingPlaceholder, are_fields=are_fields)

    def abandon(self) -> None:
        """Wait until no decoder writes to the memory of this batch, so that it can be reused."""
        if not self._future.cancel():
            wait([self._future])  # not ``result()``, which would raise an error of the abandoned batch
            self._bound.decoder.settle()

    def _start(self) -> None:
        """Allocate the memory of the batch and submit it to the decoders.

        Raises:
            DecodeError: If an image cannot be decoded, and ``on_error`` is ``"raise"`` or no image of the batch can be.
        """
        stage, count = self._bound.stage, len(self._encoded[0])
        if self._problems and (stage.on_error == "raise" or len(self._problems) == count):
            first = self._problems[min(self._problems)]
            others = len(self._problems) - 1
            more = (
                f" ({others} other sample{'s' if others > 1 else ''} of the batch cannot be decoded either)" if others else ""
            )
            way_out = (
                "Leave it out of the dataset, or pass on_error='replace' to the DecodeStage."
                if stage.on_error == "raise"
                else "Leave it out of the dataset: on_error='replace' needs at least one sample per batch that can be decoded."
            )
            subject = "A clip" if isinstance(self._encoded[0], EncodedClips) else "An image"
            raise DecodeError(f"{subject} cannot be decoded, because of {first}{more}. {way_out}")
        allocate = self._bound.decoder.allocate
        members = zip(self._encoded, self._windows, strict=True)
        self.works: list[Work | ClipWork] = [allocate(encoded, self._problems, windows) for encoded, windows in members]
        self.undecoded = sum(work.layout.undecoded_pixels for work in self.works)
        self._future: Future[list[Event]] = self._bound.decoder.start(self._pools, self.works)

    def _wait_for_decoders(self, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        """Make the copy lane wait for the decoders' events. Blocks, within ``waiting()``, while images are being decoded."""
        with nullcontext() if self._future.done() else waiting():
            events = self._future.result()
        for event in events:
            self._bound.lanes.copy.wait(event)

    def _add_problems(self, encoded: Encoded, reasons: Mapping[int, str]) -> None:
        """Add problems of one member. ``reasons``: index of each image that cannot be decoded → reason."""
        for index, reason in reasons.items():
            name = encoded.headers.names[index]
            self._problems.setdefault(index, f"sample {index}{f' ({name})' if name else ''}: {reason}")

    def _log_problems(self) -> None:
        first = "; ".join(self._problems[index] for index in sorted(self._problems)[:MAX_LOGGED_PROBLEMS])
        others = len(self._problems) - MAX_LOGGED_PROBLEMS
        more = f"; and {others} more" if others > 0 else ""
        _log.warning("Samples were replaced because their images or clips cannot be decoded: %s%s", first, more)


def _type_names(value: Any) -> str:
    """Return the names of the types of the leaves, for an error message."""
    names = [type(leaf).__name__ for leaf in batches.leaves(value)]
    return ", ".join(dict.fromkeys(names)) or "nothing"
