"""``DecodeStage``: decode images and clips onto the device, ahead of the other stages.

The stage holds the user's arguments. ``BoundDecode`` runs it on the *lanes* of a loader, which are CUDA streams with a name,
and *submits* a ``Decoding`` per batch: it begins on background threads. The batch then has a placeholder for each ``Encoded``
member (entry of the batch), until the loader *collects* the decoded images. A *window* is the part of an image that the next
stage reads. A *card* is a GPU.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from gpuaug.core import batch as batches
from gpuaug.core import devices
from gpuaug.core.batch import Batch, members_of_type
from gpuaug.core.encoded import Encoded, EncodedClips, Rows
from gpuaug.core.errors import (
    ArgumentError,
    ArgumentTypeError,
    SelectionError,
    flag,
    fraction,
    one_of,
    shown,
    whole_number,
)
from gpuaug.core.machine import allowed_cores, local_ranks
from gpuaug.core.ragged import Ragged
from gpuaug.core.rng import Position
from gpuaug.core.streams import Event, Lanes
from gpuaug.decode.decoder import Decoder
from gpuaug.decode.decoders import registry
from gpuaug.decode.decoders.base import FileDecoder, Pools
from gpuaug.decode.decoders.hybrid import LARGE_THREADS
from gpuaug.decode.decoding import Decoding, DecodingPlaceholder
from gpuaug.decode.hints import DecodedMember, Hints
from gpuaug.decode.layout import Options
from gpuaug.stages.base import BoundStage, HeldBytes, Stage
from gpuaug.stages.selection import On

MAX_PIXELS = 178_956_970
"""PIL's limit on the number of pixels of an image, above which it warns of a decompression bomb: 13 377 x 13 377."""

MAX_REPLACED = 0.01
"""Default of ``max_replaced``."""

MAX_THREADS = 4096
"""Maximum number of threads that decode on the CPU, far above any number of cores."""

CORES_PER_SPARE_CORE = 8
"""Of each group of this many cores, one core is left to other threads and the workers, and the other cores decode.

With as many threads as cores, a thread that holds the interpreter's lock may lose its core, and all others wait: 12, 14 and 16
threads on 16 cores decoded 8,300, 9,000 and 8,200 images/s without engines, and without the loops that Numba compiles (H200,
2026-11-26).
"""


class DecodeStage(Stage):
    """Decode the ``Encoded`` images of a batch into a ``Ragged``, a buffer of images of different sizes, or clips into frames.

    The stage decodes ahead of all other stages, on background threads, regardless of its position in ``stages``. The JPEG
    engines of a data-centre card (A100, H100, H200, B200) decode baseline JPEGs. Host threads and the card together decode
    progressive JPEGs and a share of the JPEGs with over 4 megapixels; on a card without engines, also all baseline JPEGs. Host
    threads decode all other files, and all files without a GPU. ``print(DecodeStage().decoders)`` lists the types of files.

    Clips of ``read_clip`` become a tensor (B, T, 3, H, W) uint8, or a ``Ragged`` of B·T frames if clips differ in size. The
    video engines of a card (``nvdec``) decode H.264, HEVC, VP9 and, if the card has an engine for it, AV1, in 4:2:0 of 8 bits;
    host threads (``pyav``) decode all other clips.

    Args:
        on: Members of the batch to decode: a selector, or several. Default: every ``Encoded``.
        backend: ``"auto"``: all available decoders: engines, hybrid (host threads and the card together) and CPU.
            ``"engines"``, ``"hybrid"``: this decoder and the CPU; an error if it is not available. ``"nvdec"``: the same for
            clips; images are decoded on the CPU. ``"cpu"``: host threads only. The decoder of an image or a clip depends only
            on its header and its number of bytes; on a card with engines, for JPEGs of over 4 megapixels, also on ``threads``.
        channels: Channels of the decoded images: 3 for RGB, 1 for grey: of a JPEG the luma in the file, of other formats PIL's
            ``convert("L")``. ``None``: as stored, with 8 or 16 bits and any number of bands; pages of a TIFF that have the same
            size and type are bands, and overviews and masks are left out. ``"labels"``: one channel of the values in the file,
            for masks of class indices: grey values, the indices of a palette, 0 and 1 for one bit; files in colour, and of
            several pages, cannot be decoded. With ``None`` and ``"labels"``, all images of a batch must have the same bits and
            bands. With 3 or 1, the first page of a TIFF is decoded.
        min_side: Decode JPEGs at the smallest of 1/1, 1/2, 1/4 and 1/8 of their size at which the short side has at least this
            many pixels. Lossless JPEGs and other formats are decoded at full size.
        scale: ``"auto"``: if a pipeline of ``gpuaug.fuse`` follows and begins with a crop that is resized, decode the window of
            the crop at the smallest of 1/1, 1/2, 1/4 and 1/8 at which it is not smaller than the size after the resize. Applies
            to JPEGs that the CPU decodes, if the fused stage transforms only images. Pixels then differ from the pixels at full
            resolution. Default: full resolution.
        exif: Whether images are rotated upright by the orientation in their EXIF, or in XMP if EXIF has none, as PIL's
            ``exif_transpose`` does, before all stages. ``False``: images of all formats are decoded as stored.
        on_error: If an image cannot be decoded: ``"raise"``: raise an error at its batch. ``"replace"``: replace its sample, in
            every member of the batch, also in members of other ``DecodeStage``s, by the nearest preceding sample that could be
            decoded; before the first such sample, by the last one. ``StreamedLoader.stats()`` counts replaced samples and lists
            their files, and log messages name some: at the first replaced sample, and each time their number has doubled.
        max_replaced: Largest share of the samples of a loader that may be replaced, from 0 to 1. Only with
            ``on_error="replace"``. Checked from the thousandth decoded sample on. The counts are part of the loader's state.
        max_pixels: Images with more pixels are treated as images that cannot be decoded, because their header may be wrong.
        max_bytes: Images that take more bytes after decoding, with all channels, are treated in the same way.
        threads: Number of threads that decode on the CPU. Default: seven eighths of the cores that this process may use,
            within its affinity and its container's CPU quota, divided by ``LOCAL_WORLD_SIZE``, the machine's number of ranks.
        name: Name of the stage in errors and traces.

    Raises:
        ArgumentError, ArgumentTypeError: If an argument has an invalid value.
        DeviceError: If ``backend`` names a decoder that cannot be used on the loader's device.
        DecodeError: In iteration, if an image cannot be decoded; with ``on_error="replace"``, if no image of a batch can be, or
            more than ``max_replaced`` of the samples were replaced.

    Warns:
        GpuAugWarning: If the host decodes all images or all clips for a GPU, because nvJPEG or PyNvVideoCodec is not installed
            for torch's CUDA or cannot be set up. Also if the streams of the process share too few hardware queues.

    Cost:
        The training thread allocates the memory for the pixels of a batch. On an H200 the engines decode about 40 000 images of
        500x420 pixels per second (``bench run files``). Device memory: the pixels of up to ``depth + 7`` batches, for the
        ``depth`` of the loader, each rounded up by at most an eighth.

        For clips, 12 threads feed the video engines. Each thread has up to 3 open sessions, one per codec and size, and closes
        the least recently used. A session takes 5 MB for 340x256 and 36 MB for 1280x720 (H.264, H100), plus about 40 frames of
        1.5 bytes per pixel. A batch takes another 1.5 bytes per pixel while it is decoded. Sessions belong to a device, and
        stay open for later loaders. A loader on an H200 decodes 242 clips per second (``bench run clips_files``): 16 frames of
        340x256 per clip, every fourth frame.

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
        channels: Literal[1, 3, "labels"] | None = 3,
        min_side: int | None = None,
        scale: Literal["auto"] | None = None,
        exif: bool = True,
        on_error: Literal["raise", "replace"] = "raise",
        max_replaced: float = MAX_REPLACED,
        max_pixels: int = MAX_PIXELS,
        max_bytes: int = 4 * 2**30,
        threads: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(on=on, into=..., name=name)
        self.backend: registry.Backend = one_of(
            "backend", backend, ("auto", "engines", "hybrid", "nvdec", "cpu"), "Leave it out to use all decoders."
        )
        self.on_error = one_of("on_error", on_error, ("raise", "replace"), "Leave it out to raise an error.")
        self.max_replaced = fraction("max_replaced", max_replaced, "Leave it out for 0.01, or pass 1 for no limit.")
        if on_error == "raise" and self.max_replaced != MAX_REPLACED:
            raise ArgumentError(
                f"max_replaced must be left out without on_error='replace', got {max_replaced}. Pass on_error='replace', "
                "or leave max_replaced out."
            )
        channels = one_of("channels", channels, (1, 3, "labels", None), "Leave it out for RGB.")
        exif = flag("exif", exif, "Leave it out to rotate images upright.")
        if min_side is not None:
            min_side = whole_number("min_side", min_side, "Leave it out to decode at full size.", least=1)
        scale = one_of("scale", scale, ("auto", None), "Leave it out to decode at full resolution.")
        for argument, value in {"min_side": min_side, "scale": scale}.items():
            if channels == "labels" and value is not None:
                way_out = "Leave it out: averages of labels are no labels."
                raise ArgumentError(f"{argument} must be left out with channels='labels', got {shown(value)}. {way_out}")
        if scale is not None and min_side is not None:
            raise ArgumentError(f"min_side must be left out with scale='auto', got {min_side}. Leave out min_side or scale.")
        max_pixels = whole_number("max_pixels", max_pixels, "Leave it out for PIL's own limit.", least=1)
        max_bytes = whole_number("max_bytes", max_bytes, "Leave it out for 4 GiB.", least=1)
        if threads is not None:
            threads = whole_number("threads", threads, "Leave it out for 7/8 of the cores.", least=1, most=MAX_THREADS)
        self.threads = threads
        self.options = Options(channels, min_side, exif, max_pixels, max_bytes, scales_windows=scale is not None)

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
        bound, iterator_state = self.bind(self.kind, lanes), dict[str, Any]()  # ``kind`` serves as the name of the stage
        consumer = lanes.consumer()
        pending: Decoding | None = None
        try:
            with lanes.launching(consumer):
                lanes.copy.make_current()
                # ``consumer`` is the current stream of the caller, which may still read memory that the copy lane reuses.
                lanes.wait_for_consumers(consumer, consumer.record_event())
                # Seed, epoch, rank and batch are 0: they would affect only crops, and no stage follows.
                batch, pending = bound.submit(encoded, iterator_state, Position(0, 0, 0, 0), ())
                assert pending is not None  # ``None`` is only for stages without work on other threads
                result: Ragged | Tensor = pending.collect(batch).to(lanes.device)
                ready = lanes.copy.record_event()
            consumer.wait(ready)
            for tensor in (result.data, result.places) if isinstance(result, Ragged) else (result,):
                consumer.reads(tensor)  # the copy lane allocated it, and must not reuse its memory before it has been read
            return result
        except BaseException:  # also an interrupt
            if pending is not None:
                pending.abandon()
            raise
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
        self.stage, self.lanes, self._hints = stage, lanes, Hints()
        options = replace(stage.options, divides_large_files=self.threads >= LARGE_THREADS)
        self.decoder = Decoder(name, lanes, options, self._decoders)
        # The user has named a decoder: ``decoders_of`` raises an error now if the decoder cannot be used.
        if stage.backend in ("engines", "hybrid"):
            self.decoder.decoders_of(Encoded)
        elif stage.backend == "nvdec":
            self.decoder.decoders_of(EncodedClips)

    def _decoders(self, encoded_type: type[Encoded]) -> list[FileDecoder]:
        """Return the decoders of images (``Encoded``) or clips (``EncodedClips``), in order of precedence."""
        find = registry.find_clips if encoded_type is EncodedClips else registry.find
        return registry.usable(find(self.stage.backend, self.lanes.device))

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
        # The number of spare cores is ``cores / CORES_PER_SPARE_CORE``, rounded to the nearest whole number.
        return self.stage.threads or cores - (cores + CORES_PER_SPARE_CORE // 2) // CORES_PER_SPARE_CORE

    def selected(self, batch: Batch) -> Any:
        """Return the members of a host batch among which the stage decodes each ``Encoded``."""
        return batch if self.selection.on in (..., None) else self.selection.read(batch)

    def submit(
        self, batch: Batch, iterator_state: dict[str, Any], position: Position, stages: Sequence[BoundStage]
    ) -> tuple[Batch, Decoding | None]:
        """Start to decode the images of a batch, and replace each ``Encoded`` by a placeholder for the decoded images.

        If the first stage that reads an ``Encoded`` crops its images, only the crop windows are decoded.

        Args:
            batch: Host batch.
            iterator_state: Name of a stage → object that the stage keeps for one iterator: here its threads (``Pools``).
            position: Seed, epoch, rank and index of the batch, on which the crops depend.
            stages: All stages of the loader, in order.

        Raises:
            SelectionError: If the batch has no encoded images.
            ArgumentError: If the batch has rows of a feature cache that no stage of the loader has.
        """
        members = members_of_type((Encoded, Rows), self.selected(batch))
        # A stage with a feature cache replaces the ``Rows`` of its cache before this call: remaining ones have no such stage.
        if any(isinstance(member, Rows) for member in members):
            raise ArgumentError(
                "A stage of the loader must have the cache that has wrapped its data set, got no stage with a cache. Pass "
                "cache= to the FeatureStage, or make the DataLoader of the data set itself."
            )
        # A batch may hold the same object in several places: it is decoded once.
        encoded = list({id(member): member for member in members if isinstance(member, Encoded)}.values())
        if not encoded:
            raise SelectionError(
                f"on must name encoded images in the batch, got {_type_names(self.selected(batch))}. Pass "
                "collate_fn=gpuaug.collate_encoded to the DataLoader, or leave the DecodeStage out."
            )
        if self.name not in iterator_state:
            iterator_state[self.name] = Pools(self.threads)
        own_members = [DecodedMember(member, member.headers, self.decoder.options) for member in encoded]
        earlier = members_of_type(DecodingPlaceholder, batch)
        self._hints.check(batch, own_members, [placeholder.decoded_member for placeholder in earlier], self.other_selections)
        readers = self._readers(batch, stages)
        windows = [
            partial(reader.windows, batch, member, position=position) if (reader := readers.get(id(member))) else None
            for member in encoded
        ]
        decoding = Decoding(
            self.decoder,
            iterator_state[self.name],
            encoded,
            windows,
            earlier=[placeholder.decoding for placeholder in earlier],
            max_replaced=None if self.stage.on_error == "raise" else self.stage.max_replaced,
            position=position,
        )
        return decoding.with_placeholders(batch), decoding

    def _readers(self, batch: Batch, stages: Sequence[BoundStage]) -> dict[int, BoundStage]:
        """Return ``id`` of an ``Encoded`` that occurs once in a host batch → the first stage that reads it."""
        counts = Counter(map(id, members_of_type(Encoded, batch)))
        readers: dict[int, BoundStage] = {}
        for stage in stages:
            if isinstance(stage, BoundDecode):
                continue
            try:
                values = stage.selection.read(batch)
            except SelectionError:  # the stage reads a member that an earlier stage adds, and perhaps an ``Encoded`` as well
                break
            for member in map(id, members_of_type(Encoded, values)):
                if counts[member] == 1:  # other occurrences of a member are not cropped
                    readers.setdefault(member, stage)
        return readers

    def _values(self, batch: Batch) -> tuple[Any, ...]:
        """Return an empty tuple: the images are decoded before the batch is copied."""
        return ()

    def write(self, batch: Batch, result: Any) -> Batch:
        """Return the batch unchanged."""
        return batch

    def run(self, values: tuple[Any, ...], ready: Event, position: Position, iterator_state: dict[str, Any]) -> None:
        """Do nothing: the images are decoded already."""

    def held_bytes(self) -> HeldBytes:
        """Return the bytes of images that are being decoded, of decoded pixels that are not freed, and of decoders."""
        return HeldBytes(*self.decoder.held_bytes)

    def close(self, iterator_state: dict[str, Any]) -> None:
        """End the threads of an iterator."""
        if self.name in iterator_state:
            iterator_state.pop(self.name).close()
            self.decoder.settle()


def _type_names(value: Any) -> str:
    """Return the names of the types of the leaves, for an error message."""
    leaves = batches.leaves(value)
    names = ["images of a DecodeStage" if type(leaf) is DecodingPlaceholder else type(leaf).__name__ for leaf in leaves]
    return ", ".join(dict.fromkeys(names)) or "nothing"
