"""``DecodeStage``: decodes images onto the device, ahead of the other stages."""

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
from gpuaug.decode.layout import Options, WindowsOf, nearest_good, problems
from gpuaug.decode.members import map_instances, with_samples_from
from gpuaug.decode.work import Work
from gpuaug.stages.base import BoundStage, Stage
from gpuaug.stages.selection import On

OnError = Literal["raise", "replace"]

MAX_PIXELS = 178_956_970
"""PIL's limit for the pixels of one image, above which it warns of a decompression bomb: 13 377 x 13 377."""

MOST_THREADS = 4096
"""Most threads that decode on the CPU, far above any number of cores."""

SPARED = 4
"""One core of this number is left to the other threads and the workers.

With as many threads as cores, a thread that holds the interpreter's lock may lose its core, and all others wait: on 16 cores
beside a ResNet-50, 16 threads fed it 5 000 images a second and 12 threads 5 900.
"""

MOST_NAMED = 3
"""Images that a log line names; it counts the others."""

_log = logging.getLogger("gpuaug")


class DecodeStage(Stage):
    """Decodes the ``Encoded`` images of a batch into a ``Ragged``, or its clips into frames, on the device.

    It works ahead of the other stages, on threads of its own, wherever it stands among them. The JPEG engines of a data-centre
    card (A100, H100, H200, B200) take baseline JPEGs; host threads and the card together take progressive ones, and without
    engines baseline ones too; host threads decode all else, and without a GPU all images. ``print(DecodeStage().decoders)``
    shows which decoder takes what here.

    Clips of ``read_clip`` become a tensor (B, T, 3, H, W) uint8, or a ``Ragged`` of B·T frames where clips differ in size. The
    video engines of a card (``nvdec``) take H.264, HEVC, VP9 and, if the card has an engine for it, AV1, in 4:2:0 of 8 bits;
    host threads (``pyav``) take all other clips.

    Args:
        on: Members of the batch to decode: a selector, or several. Left out: every ``Encoded`` in it.
        backend: ``"auto"``: all decoders that there are: engines, hybrid (host threads read the Huffman codes, the card does
            the rest) and CPU. ``"engines"``, ``"hybrid"``: that decoder and the CPU, and an error without that decoder.
            ``"nvdec"``: as ``"auto"`` for clips, and an error without that decoder. ``"cpu"``: host threads alone. The header
            alone of an image or a clip decides which decoder it gets.
        channels: Channels of the decoded images: 3 for RGB, 1 for grey. ``None``: as stored, of 8 or 16 bits and any number of
            bands, which have to be the same for all images of a batch.
        min_side: Decode JPEGs at 1/2, 1/4 or 1/8 of their size where the short side keeps at least this many pixels. Lossless
            JPEGs and other formats are decoded whole.
        scale: ``"auto"``: of JPEGs that the CPU decodes, decode the window that a fused stage crops to at the smallest of 1/1,
            1/2, 1/4 and 1/8 at which it still has the size that it is resized to, if images alone go through that stage. Pixels
            then differ from the pixels of whole images. Left out: full resolution.
        exif: Whether images are turned upright by the orientation in their EXIF, or in XMP alone, before any stage sees their
            size: as by PIL's ``exif_transpose``. ``False`` gives images of all formats as they are stored.
        on_error: For an image that cannot be decoded, ``"raise"`` an error at its batch, or ``"replace"`` its sample, in every
            member of the batch, by the nearest good sample before it, cyclically. ``stats()`` counts replaced samples, and a
            log line names the first.
        max_pixels: Images with more pixels are not decoded: their header may lie.
        threads: Number of threads that decode on the CPU. Left out: three quarters of the cores that this process may use,
            within its affinity and the CPU quota of its container, divided by the number of ranks on this machine
            (``LOCAL_WORLD_SIZE``).
        name: The stage's name in errors and traces.

    Raises:
        ArgumentError: For a value that cannot work, at once.
        DeviceError: If ``backend`` names a decoder that cannot be used on the loader's device.
        DecodeError: At its batch, for an image that cannot be decoded; with ``on_error="replace"`` only if no image can be.

    Warns:
        GpuAugWarning: If a GPU's images are decoded on the host because nvJPEG is not installed for torch's CUDA or cannot be
            set up, or on the card in a process whose streams share too few hardware queues.

    Cost:
        The thread that trains allocates memory for the pixels of a batch. On an H200 the engines decode some 35 000 images of
        500x420 pixels a second (``bench run files``). Memory on the device: the pixels of up to
        ``depth + 7`` batches, each rounded up by an eighth at most.

        Of clips, besides: 8 threads feed the video engines, each with up to 3 open sessions, for a codec and a size; the least
        recently used one is closed. A session takes 5 MB for 340x256 and 36 MB for 1280x720 (H.264, H100), and some 40 frames
        of 1.5 bytes per pixel. A batch takes 1.5 bytes per pixel more while it is decoded. Sessions are a device's, and stay
        open for later loaders. On an H100, 319 clips of 16 frames of 340x256, every fourth, are decoded a second.

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
        backend: registry.Backend = "auto",
        channels: Literal[1, 3] | None = 3,
        min_side: int | None = None,
        scale: Literal["auto"] | None = None,
        exif: bool = True,
        on_error: OnError = "raise",
        max_pixels: int = MAX_PIXELS,
        threads: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(on=on, into=..., name=name)
        self.backend: registry.Backend = one_of(
            "backend", backend, ("auto", "engines", "hybrid", "nvdec", "cpu"), "Leave it out to have what fits."
        )
        self.on_error: OnError = one_of("on_error", on_error, ("raise", "replace"), "Leave it out to have errors raised.")
        channels = one_of("channels", channels, (1, 3, None), "Leave it out for RGB.")
        exif = flag("exif", exif, "Leave it out to have images upright.")
        if min_side is not None:
            min_side = whole_number("min_side", min_side, "Leave it out to decode whole images.", least=1)
        scale = one_of("scale", scale, ("auto", None), "Leave it out to decode in full resolution.")
        if scale is not None and min_side is not None:
            raise ArgumentError(f"min_side must be left out with scale='auto', got {min_side}. Leave one of them out.")
        max_pixels = whole_number("max_pixels", max_pixels, "Leave it out for PIL's own limit.", least=1)
        if threads is not None:
            threads = whole_number("threads", threads, "Leave it out for 3/4 of the cores.", least=1, most=MOST_THREADS)
        self.threads = threads
        self.options = Options(channels, min_side, exif, max_pixels, scales_windows=scale is not None)

    def __repr__(self) -> str:
        return f"DecodeStage(backend={self.backend!r}, on_error={self.on_error!r})"

    @property
    def decoders(self) -> registry.DecoderTable:
        """The decoders on this machine's accelerator: what each takes, or why it is not used. Print it.

        Raises:
            DeviceError: If ``backend`` names a decoder that cannot be used.

        Cost:
            Sets nvJPEG up for the device once in a process: about a second.

        Examples:
            >>> DecodeStage(backend="cpu").decoders["engines"].words
            "backend='cpu'"
        """
        device = devices.resolve(None)
        return registry.DecoderTable({**registry.find(self.backend, device), **registry.find_clips(self.backend, device)})

    def __call__(self, encoded: Encoded, device: torch.device | str | int | None = None) -> Ragged | Tensor:
        """Decode one batch at once, without a loader.

        Args:
            encoded: A member of a batch from ``collate_encoded``.
            device: Device of the decoded images. Left out: this machine's accelerator, or the CPU without one.

        Returns:
            The images, or a tensor (B, T, 3, H, W) of clips, ready on the current stream.

        Raises:
            ArgumentTypeError: If ``encoded`` is no ``Encoded``.
            DecodeError: As in a loader.

        Cost:
            Starts threads for this one call, in about 5 ms. The first call in a process sets nvJPEG up: about a second.
        """
        if not isinstance(encoded, Encoded):
            way_out = "Pass the member of a batch that gpuaug.collate_encoded has made."
            raise ArgumentTypeError(f"encoded must be a gpuaug.Encoded, got {shown(encoded)}. {way_out}")
        lanes = Lanes(devices.resolve(device))
        bound, memory = self.bind(self.kind, lanes), dict[str, Any]()
        consumer = lanes.consumer()
        try:
            with lanes.launching(consumer):
                lanes.copy.make_current()
                lanes.wait_for_consumers(consumer, consumer.record_event())
                batch, pending = bound.submit(encoded, memory, Position(0, 0, 0, 0), ())
                assert pending is not None
                made: Ragged | Tensor = pending.collect(batch).to(lanes.device)
                ready = lanes.copy.record_event()
            consumer.wait(ready)
            for tensor in (made.data, made.places) if isinstance(made, Ragged) else (made,):
                consumer.reads(tensor)
            return made
        finally:
            bound.close(memory)

    def bind(self, name: str, lanes: Lanes) -> "BoundDecode":
        """Prepare to run on the lanes of one loader."""
        return BoundDecode(name, self, lanes)


class BoundDecode(BoundStage):
    """A ``DecodeStage`` on the lanes of one loader."""

    ahead = 2
    """Number of batches that may be decoding at once, in addition to the ``depth`` batches whose stages have been queued on the
    device."""

    def __init__(self, name: str, stage: DecodeStage, lanes: Lanes) -> None:
        super().__init__(name, stage.selection, lanes)
        self.stage, self.lanes = stage, lanes
        images = partial(registry.find, stage.backend, lanes.device)
        clips = partial(registry.find_clips, stage.backend, lanes.device)
        used = registry.used
        self.decoder = Decoder(name, lanes, stage.options, lambda: used(images()), lambda: used(clips()))
        if stage.backend in ("engines", "hybrid"):
            self.decoder.decoders_of(Encoded)
        elif stage.backend == "nvdec":
            self.decoder.decoders_of(EncodedClips)

    def versions(self, named: Collection[str] = ()) -> dict[str, str]:
        """Decoders of images, by the stage's name, and of clips, by that name with ``", clips"``."""
        keys = {Encoded: self.name, EncodedClips: f"{self.name}, clips"}
        return {
            key: "; ".join(f"{each.name}: {each.version}" for each in self.decoder.decoders_of(kind))
            for kind, key in keys.items()
            if kind in self.decoder.found or key in named
        }

    @property
    def threads(self) -> int:
        """Number of threads that decode on the CPU."""
        cores = max(allowed_cores() // local_ranks(), 1)
        return self.stage.threads or cores - cores // SPARED

    def submit(
        self, batch: Batch, memory: dict[str, Any], position: Position, stages: Sequence[BoundStage]
    ) -> tuple[Batch, "Decoding | None"]:
        """Start to decode the images of a batch. Each is replaced by a placeholder, which gives the decoded images when copied.

        Of images that one stage alone reads, the windows that it reads are decoded.

        Raises:
            SelectionError: If there are no encoded images.
        """
        chosen = batch if self._selection.on in (..., None) else self._selection.read(batch)
        found = {id(leaf): leaf for leaf in _encoded_in(chosen)}
        if not found:
            raise SelectionError(
                f"on must name encoded images in the batch, got {_form(chosen)}. Pass collate_fn=gpuaug.collate_encoded to the "
                "DataLoader, or leave the DecodeStage out."
            )
        if self.name not in memory:
            memory[self.name] = Pools(self.threads)
        encoded = list(found.values())
        windows = [partial(self._windows, each, batch, position, stages) for each in encoded]
        decoding = Decoding(self, encoded, windows, memory[self.name])
        return decoding.with_placeholders(batch), decoding

    def _windows(
        self, encoded: Encoded, batch: Batch, position: Position, stages: Sequence[BoundStage], shapes: Shapes
    ) -> Windows | None:
        """The windows of the images that the first stage to read ``encoded`` reads; ``None`` for whole images."""
        if sum(each is encoded for each in _encoded_in(batch)) > 1:
            return None
        for stage in stages:
            if isinstance(stage, BoundDecode):
                continue
            try:
                values = stage.selected(batch)
            except SelectionError:  # it reads what another stage adds
                return None
            if any(each is encoded for each in _encoded_in(values)):
                return stage.windows(batch, encoded, shapes, position)
        return None

    def read(self, batch: Batch) -> tuple[Any, ...]:
        """An empty tuple: the images are decoded before the batch is copied."""
        return ()

    def write(self, batch: Batch, result: Any) -> Batch:
        """The unchanged batch."""
        return batch

    def run(self, values: tuple[Any, ...], ready: Event, position: Position, memory: dict[str, Any]) -> None:
        """Does nothing: the images are decoded already."""

    @property
    def pinned_bytes(self) -> int:
        """Page-locked bytes of the images that the CPU decodes, and of decoders."""
        return self.decoder.pinned_bytes

    @property
    def decode_bytes(self) -> int:
        """Bytes on the device for decoded pixels of batches that have not been freed, and of decoders."""
        return self.decoder.device_bytes

    def close(self, memory: dict[str, Any]) -> None:
        """End the threads of an iterator."""
        if self.name in memory:
            memory.pop(self.name).close()
            self.decoder.settle()


class DecodingPlaceholder:
    """Placeholder for one ``Encoded`` member while it is being decoded. Its ``.to(device)`` returns the decoded ``Ragged``."""

    __slots__ = ("_decoding", "_number")

    def __init__(self, decoding: "Decoding", number: int) -> None:
        self._decoding, self._number = decoding, number

    def to(self, device: torch.device, non_blocking: bool = False) -> Ragged | Tensor:
        """The decoded images or clips. Called in place of a copy, on the copy lane, which waits for the decoder."""
        return self._decoding.works[self._number].to(device, non_blocking=non_blocking)


class Decoding:
    """The decoding of one batch, from its start to its end."""

    def __init__(self, bound: BoundDecode, encoded: list[Encoded], windows: Sequence[WindowsOf], pools: Pools) -> None:
        self._bound, self._encoded, self._windows, self._pools = bound, encoded, windows, pools
        self._bad: dict[int, str] = {}
        self.replaced = 0
        """Number of samples that were replaced by another one of the batch."""
        self.undecoded = 0
        """Number of pixels outside of the windows that are decoded."""
        for each in encoded:
            options = bound.stage.options
            found = clip_problems(each.headers, options) if isinstance(each, EncodedClips) else problems(each.headers, options)
            self._note(each, found)
        self._start()

    def done(self) -> bool:
        """Whether ``collect`` returns without waiting for the decoder."""
        return self._future.done()

    def with_placeholders(self, batch: Batch) -> Batch:
        """The batch with a placeholder for each ``Encoded``."""
        numbers = {id(each): number for number, each in enumerate(self._encoded)}
        return map_instances(
            lambda each: DecodingPlaceholder(self, numbers[id(each)]) if id(each) in numbers else each, Encoded, batch
        )

    def collect(self, batch: Batch, waiting: Callable[[], AbstractContextManager[None]] = nullcontext) -> Batch:
        """Wait for the decoder on the host, and make the copy lane, which is current, wait for its event.

        Args:
            batch: The batch, with a placeholder for each ``Encoded``.
            waiting: Makes the block in which this thread blocks. Not called if the images are decoded.

        Returns:
            The batch. Samples whose image could not be decoded are replaced.

        Raises:
            DecodeError: If an image cannot be decoded, and ``on_error`` is ``"raise"`` or no image of the batch can be.
        """
        self._wait_for_decoders(waiting)
        while any(work.problems for work in self.works):
            for work in self.works:
                self._note(work.encoded, {int(work.layout.sources[index]): why for index, why in work.problems.items()})
            self._start()  # all images anew: their places follow from the sizes of the images before them
            self._wait_for_decoders(waiting)
        if not self._bad:
            return batch
        self.replaced = len(self._bad)
        self._log()
        return with_samples_from(nearest_good(len(self._encoded[0]), self._bad), batch, DecodingPlaceholder)

    def abandon(self) -> None:
        """Wait until nothing is decoded into this batch's memory any more, so that it may be reused."""
        if not self._future.cancel():
            wait([self._future])  # not ``result()``: it would raise an error of a batch that nobody reads
            self._bound.decoder.settle()

    def _start(self) -> None:
        stage, count = self._bound.stage, len(self._encoded[0])
        if self._bad and (stage.on_error == "raise" or len(self._bad) == count):
            first = self._bad[min(self._bad)]
            more = f", and {len(self._bad) - 1} more of the batch cannot be either" if len(self._bad) > 1 else ""
            way_out = (
                "Leave it out of the dataset, or pass on_error='replace' to the DecodeStage."
                if stage.on_error == "raise"
                else "Leave it out of the dataset: on_error='replace' takes another image of the batch, which has none."
            )
            what = "A clip" if isinstance(self._encoded[0], EncodedClips) else "An image"
            raise DecodeError(f"{what} cannot be decoded, because of {first}{more}. {way_out}")
        allocate = self._bound.decoder.allocate
        members = zip(self._encoded, self._windows, strict=True)
        self.works: list[Work | ClipWork] = [allocate(encoded, self._bad, windows) for encoded, windows in members]
        self.undecoded = sum(work.layout.undecoded for work in self.works)
        self._future: Future[list[Event]] = self._bound.decoder.start(self._pools, self.works)

    def _wait_for_decoders(self, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        """Make the copy lane wait for the decoders' events. Blocks, within ``waiting()``, while images are being decoded."""
        with nullcontext() if self._future.done() else waiting():
            events = self._future.result()
        for event in events:
            self._bound.lanes.copy.wait(event)

    def _note(self, encoded: Encoded, found: Mapping[int, str]) -> None:
        for index, why in found.items():
            name = encoded.headers.names[index]
            self._bad.setdefault(index, f"sample {index}{f' ({name})' if name else ''}: {why}")

    def _log(self) -> None:
        first = "; ".join(self._bad[index] for index in sorted(self._bad)[:MOST_NAMED])
        more = f"; and {len(self._bad) - MOST_NAMED} more" if len(self._bad) > MOST_NAMED else ""
        _log.warning("Samples were replaced because their images or clips cannot be decoded: %s%s", first, more)


def _encoded_in(batch: Batch) -> list[Encoded]:
    found: list[Encoded] = []

    def note(each: Encoded) -> Encoded:
        found.append(each)
        return each

    map_instances(note, Encoded, batch)
    return found


def _form(chosen: Any) -> str:
    kinds = [type(leaf).__name__ for leaf in batches.leaves(chosen)]
    return ", ".join(dict.fromkeys(kinds)) or "nothing"
