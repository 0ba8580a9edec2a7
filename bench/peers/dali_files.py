"""Files through NVIDIA DALI's reader and decoders, to batches on the card.

Decoders get the size of the largest image, so that they allocate once. The augmentation is ``jitter_and_flip`` of
``bench.peers.dali``. DALI has no bfloat16, so images are float16, with as many bytes.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.harness.optional_rows import MissingError
from bench.peers.dali import AREA, ASPECT, jitter_and_flip

_THREADS = (4, 8, 16)
_ENGINE_LOADS = (0.65, 0.9, 1.0)  # DALI's default first
_SMALL_ENGINE_LOADS = (0.5, 0.0)  # tried with all threads only, for files that the engines cannot decode


def axes(
    cores: int, *, mixed: bool, engines: bool = True, regions: Sequence[bool] = (True, False)
) -> list[list[dict[str, Any]]]:
    """Return the settings to search. Threads and loads are one axis: with few threads, a larger load of the engines is faster.

    Args:
        cores: Largest number of threads.
        mixed: Whether decoders are created with ``device="mixed"``.
        engines: Whether mixed decoders may use the JPEG engines.
        regions: Values of ``region`` to try.
    """
    threads = [count for count in _THREADS if count <= cores] or [cores]
    if mixed and engines:
        thread_settings = [{"threads": count, "load": load} for count in threads for load in _ENGINE_LOADS]
        thread_settings += [{"threads": threads[-1], "load": load} for load in _SMALL_ENGINE_LOADS]
    else:
        thread_settings = [{"threads": count} | ({"load": 0.0} if mixed else {}) for count in threads]
    return [thread_settings, [{"region": region} for region in regions], [{"ahead": 2}, {"ahead": 3}]]


def batches(
    root: Path,
    batch_size: int,
    size: int,
    device: torch.device,
    *,
    largest_px: tuple[int, int],
    threads: int,
    region: bool,
    ahead: int,
    load: float | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images (B, 3, size, size) float16, channels last, and labels (B,), on the device, without end.

    Args:
        root: A folder of class folders.
        batch_size: Number of images in a batch.
        size: Side of the augmented images in pixels.
        device: Device of the batches. On a CPU, DALI's CPU operators run.
        largest_px: Largest width and largest height of the files.
        threads: Number of DALI's threads.
        region: Whether the decoder crops (``image_random_crop``). Otherwise whole images are decoded, and cropped afterwards.
        ahead: Number of batches that are prepared ahead (``prefetch_queue_depth``).
        load: Share of the images that the engines decode (``hw_decoder_load``). ``None``: decoders run on the CPU.

    Raises:
        MissingError: If DALI is not installed.
    """
    try:
        from nvidia.dali import fn, pipeline_def, types
    except ImportError as error:
        raise MissingError(f"not installed: {error}") from None
    on_gpu, mixed = device.type == "cuda", load is not None
    crop = {"random_area": AREA, "random_aspect_ratio": ASPECT}
    decoder: dict[str, Any] = {"device": "mixed" if mixed else "cpu", "output_type": types.RGB}
    if mixed:
        width, height = largest_px
        hints = {"preallocate_width_hint": width, "preallocate_height_hint": height}
        decoder |= hints | {"hw_decoder_load": load}

    @pipeline_def(
        batch_size=batch_size,
        num_threads=threads,
        device_id=device.index or 0 if on_gpu else None,
        seed=0,
        prefetch_queue_depth=ahead,
        exec_dynamic=True,
    )
    def pipeline() -> Any:
        files, labels = fn.readers.file(file_root=str(root), random_shuffle=True, name="files")
        images = fn.decoders.image_random_crop(files, **decoder, **crop) if region else fn.decoders.image(files, **decoder)
        if on_gpu:
            images, labels = images.gpu(), labels.gpu()
        images = (
            fn.resize(images, size=(size, size), antialias=True)
            if region
            else fn.random_resized_crop(images, size=(size, size), antialias=True, **crop)
        )
        return jitter_and_flip(fn, types, torch.float16, images), labels

    dali_pipeline = pipeline()
    dali_pipeline.build()
    while True:
        # With a stream, run() returns before the batch is ready, and the stream waits.
        outputs = dali_pipeline.run(torch.cuda.current_stream(device)) if on_gpu else dali_pipeline.run()
        images, labels = (torch.from_dlpack(output.as_tensor()) for output in outputs)
        yield images.permute(0, 3, 1, 2), labels.flatten().long()
