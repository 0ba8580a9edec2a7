"""The augmentation pipelines in NVIDIA DALI: over a batch that stays in memory, and behind a DataLoader.

DALI reads images (B, H, W, C) through ``external_source``, without a copy where the batch stays in memory. It draws for every
image, prepares two batches ahead on its own threads and streams (its default), and returns the result as a view on the current
stream. It has no bfloat16, so half-precision pipelines end in float16, with as many bytes. Crops and resizes are not
antialiased unless asked for, as in Kornia.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.data.pipelines import MEAN, STD
from bench.harness.optional_rows import MissingError

AREA, ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)


def build(
    body: Callable[..., Any],
    images: Tensor,
    masks: Tensor | None,
    dtype: torch.dtype,
    targets: Sequence[dict[str, Tensor]] | None = None,
) -> Callable[[], Any]:
    """A function that augments ``images`` at each call.

    Args:
        body: Builds DALI's graph, as the values of ``PIPELINES`` do.
        images: (B, C, H, W) uint8. On a CPU, DALI's CPU operators run.
        masks: (B, 1, H, W) uint8, or ``None``.
        dtype: Data type of the augmented images; bfloat16 becomes float16.
        targets: A dict of each image with ``boxes`` (n, 4) as corners in pixels, which come out padded, (B, n, 4).

    Raises:
        ImportError: If DALI is not installed.
    """
    from nvidia.dali import fn, pipeline_def, types

    device = images.device
    on = "gpu" if device.type == "cuda" else "cpu"
    side = images.shape[-1]
    # Converted to DALI's layout once; CPU operators take NumPy arrays.
    sources = [part.permute(0, 2, 3, 1).contiguous() for part in (images, masks) if part is not None]
    if on == "cpu":
        sources = [part.numpy() for part in sources]
    boxes = [target["boxes"].cpu().numpy() for target in targets or ()]

    @pipeline_def(**_settings(len(images), device))
    def pipeline() -> Any:
        read = fn.external_source(
            source=lambda: tuple(sources),
            num_outputs=len(sources),
            device=on,
            layout="HWC",
            dtype=types.UINT8,
            ndim=3,
            no_copy=True,
        )
        if not boxes:
            return body(fn, types, side, dtype, *read)
        # As in DALI's own examples, boxes are changed on the host and padded.
        found, moved = body(fn, types, side, dtype, *read, fn.external_source(source=lambda: boxes, dtype=types.FLOAT, ndim=2))
        moved = fn.pad(moved)
        return found, moved.gpu() if on == "gpu" else moved

    made = pipeline()
    made.build()

    def call() -> Any:
        found = _run(made, device)
        return found[0] if len(found) == 1 else found

    return call


def build_ragged(images: Sequence[Tensor], side: int, *, antialias: bool, device: torch.device) -> Callable[[], Tensor]:
    """A function that augments images of different sizes at each call, by the pipeline ``cls``.

    Args:
        images: (H, W, C) uint8 each, on ``device`` or page-locked on the host, from where DALI copies them.
        side: Side of the augmented images in pixels.
        antialias: Whether the crop is antialiased.
        device: On a CPU, DALI's CPU operators run.

    Raises:
        MissingError: If DALI is not installed.
    """
    try:
        from nvidia.dali import fn, pipeline_def, tensors, types
    except ImportError as error:
        raise MissingError(f"not installed: {error}") from None
    on_host = images[0].device.type == "cpu"
    # One list for all calls, so that no call converts tensors one by one; DALI takes the list as it is.
    if on_host:
        parts = [tensors.TensorCPU(image.numpy(), "HWC", is_pinned=image.is_pinned()) for image in images]
        batch = tensors.TensorListCPU(parts, "HWC", contiguous=False)
    else:
        batch = tensors.TensorListGPU([tensors.TensorGPU(image, "HWC") for image in images], "HWC", contiguous=False)

    @pipeline_def(**_settings(len(images), device))
    def pipeline() -> Any:
        read = fn.external_source(
            source=lambda: batch, device="cpu" if on_host else "gpu", layout="HWC", dtype=types.UINT8, ndim=3, no_copy=True
        )
        if on_host and device.type == "cuda":
            read = read.gpu()
        # The pipeline crops to seven eighths of its argument, rounded down.
        return classification(fn, types, -(-side * 8 // 7), torch.bfloat16, read, antialias=antialias)

    made = pipeline()
    made.build()

    def call(_held: Sequence[Tensor] = images) -> Tensor:
        return _run(made, device)[0]

    return call


class Batches:
    """Batches of a loader, augmented by DALI: (B, C, H, W) float32 images on the device, and unchanged labels.

    Args:
        name: A key of ``PIPELINES``, of a pipeline without masks.
        loader: Yields batches of ``batch_size`` (C, H, W) uint8 images and their labels.
        batch_size: Images of a batch.
        side: Side of the images in pixels.
        device: Device of the augmented images. On a CPU, DALI's CPU operators run.

    Raises:
        MissingError: If DALI is not installed.
    """

    def __init__(
        self, name: str, loader: Iterable[tuple[Tensor, Tensor]], batch_size: int, side: int, device: torch.device
    ) -> None:
        try:
            from nvidia.dali import fn, pipeline_def, types
        except ImportError as error:
            raise MissingError(f"not installed: {error}") from None
        self.loader, self.device = loader, device
        body = PIPELINES[name]
        on_gpu = device.type == "cuda"

        @pipeline_def(**_settings(batch_size, device))
        def pipeline(pull: Callable[[], Any]) -> Any:
            read = fn.external_source(source=pull, device="cpu", layout="CHW", dtype=types.UINT8, ndim=3)
            if on_gpu:
                read = read.gpu()
            return body(fn, types, side, torch.float32, fn.transpose(read, perm=[1, 2, 0]))

        self._pipeline = pipeline

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        source: Iterator[tuple[Tensor, Tensor]] | None = iter(self.loader)
        labels: deque[Tensor] = deque()

        def pull() -> Any:
            # DALI pulls batches ahead: their labels are queued until their images come out.
            assert source is not None
            images, own = next(source)
            labels.append(own)
            return images.numpy()

        made = self._pipeline(pull)
        made.build()
        try:
            while True:
                (images,) = _run(made, self.device)
                yield images, labels.popleft()
        finally:
            # A pipeline is part of a reference cycle and holds its loader. A DataLoader that the garbage collector frees loses
            # its queues before it can stop its workers, and then waits five seconds for each.
            source = None


def _settings(batch_size: int, device: torch.device) -> dict[str, Any]:
    return {
        "batch_size": batch_size,
        "num_threads": 4,
        "device_id": device.index or 0 if device.type == "cuda" else None,
        "seed": 0,
        "prefetch_queue_depth": 2,
        "exec_dynamic": True,
        "enable_conditionals": True,
    }


def _run(made: Any, device: torch.device) -> list[Tensor]:
    # Given a stream, it returns before the batch is ready, and the stream waits.
    parts = made.run(torch.cuda.current_stream(device)) if device.type == "cuda" else made.run()
    found = [torch.from_dlpack(part.as_tensor()) for part in parts]
    # float32 pipelines leave DALI as (B, C, H, W) already; masks never do, and boxes (B, n, 4) stay.
    return [part if part.dtype == torch.float32 else part.permute(0, 3, 1, 2) for part in found]


def heavy(fn: Any, types: Any, side: int, dtype: torch.dtype, images: Any) -> Any:
    """Random crop, resize, rotation and blur."""
    images = fn.crop(
        images,
        crop=(side // 2, side // 2),
        crop_pos_x=fn.random.uniform(range=(0, 1)),
        crop_pos_y=fn.random.uniform(range=(0, 1)),
    )
    images = fn.resize(images, size=(side, side), antialias=False)
    images = fn.rotate(images, angle=fn.random.uniform(range=(-45.0, 45.0)), keep_size=True, fill_value=0)
    images = fn.gaussian_blur(images, sigma=fn.random.uniform(range=(0.1, 2.0)), window_size=7)
    return normalize(fn, types, dtype, images)


def classification(fn: Any, types: Any, side: int, dtype: torch.dtype, images: Any, *, antialias: bool = False) -> Any:
    """Random resized crop, flip and jitter."""
    images = fn.random_resized_crop(
        images, size=(side * 7 // 8,) * 2, random_area=AREA, random_aspect_ratio=ASPECT, antialias=antialias
    )
    return jitter_and_flip(fn, types, dtype, images)


def jitter_and_flip(fn: Any, types: Any, dtype: torch.dtype, images: Any) -> Any:
    """Jitter and flip, the transforms after the crop."""
    images = fn.color_twist(images, brightness=_factor(fn), contrast=_factor(fn), saturation=_factor(fn))
    return normalize(fn, types, dtype, images, mirror=fn.random.coin_flip())


def contrastive(fn: Any, types: Any, side: int, dtype: torch.dtype, images: Any) -> Any:
    """Random resized crop, flip, jitter with hue, grey and blur, each applied to some of the images."""
    images = fn.random_resized_crop(
        images, size=(side * 7 // 8,) * 2, random_area=AREA, random_aspect_ratio=ASPECT, antialias=False
    )
    jittered = fn.random.coin_flip(probability=0.8)
    images = fn.color_twist(
        images,
        brightness=_factor(fn) * jittered + (1.0 - jittered),
        contrast=_factor(fn) * jittered + (1.0 - jittered),
        saturation=_factor(fn) * jittered + (1.0 - jittered),
        # Degrees: a tenth of the circle, 0.1 for Kornia and torchvision.
        hue=fn.random.uniform(range=(-36.0, 36.0)) * jittered,
    )
    images = fn.saturation(images, saturation=1.0 - fn.random.coin_flip(probability=0.2))
    # A condition, so that only half of the images are blurred.
    if fn.random.coin_flip(probability=0.5, dtype=types.BOOL):
        images = fn.gaussian_blur(images, sigma=fn.random.uniform(range=(0.1, 2.0)), window_size=23)
    return normalize(fn, types, dtype, images, mirror=fn.random.coin_flip())


def segmentation(fn: Any, types: Any, side: int, dtype: torch.dtype, images: Any, masks: Any) -> Any:
    """The pipeline of classification, with masks that are cropped and flipped alike."""
    start, extent = fn.random_crop_generator([side, side], random_area=AREA, random_aspect_ratio=ASPECT)
    start = fn.cast(start, dtype=types.FLOAT)
    end = start + fn.cast(extent, dtype=types.FLOAT)
    size = (side * 7 // 8,) * 2
    images = fn.resize(images, size=size, roi_start=start, roi_end=end, antialias=False)
    masks = fn.resize(masks, size=size, roi_start=start, roi_end=end, interp_type=types.INTERP_NN)
    images = fn.color_twist(images, brightness=_factor(fn), contrast=_factor(fn), saturation=_factor(fn))
    mirror = fn.random.coin_flip()
    return normalize(fn, types, dtype, images, mirror=mirror), fn.flip(masks, horizontal=mirror)


def randaugment(fn: Any, types: Any, _side: int, dtype: torch.dtype, images: Any) -> Any:
    """DALI's own RandAugment, whose ops are drawn for every image."""
    from nvidia.dali.auto_aug import rand_augment

    return normalize(fn, types, dtype, rand_augment.rand_augment(images, n=2, m=10))


def hflip(fn: Any, types: Any, side: int, _dtype: torch.dtype, images: Any, boxes: Any) -> Any:
    """The preset ``hflip`` of torchvision's: flip, to float32."""
    mirror = fn.random.coin_flip()
    images = fn.crop_mirror_normalize(images, mirror=mirror, std=255.0, dtype=types.FLOAT, output_layout="CHW")
    return images, fn.bb_flip(boxes / side, ltrb=True, horizontal=mirror) * side


def lsj(fn: Any, types: Any, side: int, dtype: torch.dtype, images: Any, boxes: Any) -> Any:
    """The preset ``lsj`` of torchvision's: resize by a random scale, crop or pad, ``hflip``."""
    from nvidia.dali import math

    resized = math.floor(fn.random.uniform(range=(0.1, 2.0)) * side)
    images = fn.resize(images, resize_shorter=resized, antialias=True)
    # Negative where the image is smaller than the crop, which is then padded.
    top, left = (math.floor(fn.random.uniform(range=(0, 1)) * (resized - side + 1)) for _ in range(2))
    start = fn.cast(fn.stack(top, left), dtype=types.INT32)
    images = fn.slice(
        images, start=start, shape=[side, side], axis_names="HW", out_of_bounds_policy="pad", fill_values=[123, 117, 104]
    )
    boxes = boxes * (resized / side) - fn.stack(left, top, left, top)
    return hflip(fn, types, side, dtype, images, math.clamp(boxes, 0.0, float(side)))


def segmentation_preset(fn: Any, types: Any, side: int, dtype: torch.dtype, images: Any, masks: Any) -> Any:
    """The preset of torchvision's segmentation: resize by a random scale, crop or pad, flip and normalise."""
    out = side * 12 // 13
    resized = fn.random.uniform(range=(side // 2, side * 2))
    crop = {
        "crop": (out, out),
        "crop_pos_x": fn.random.uniform(range=(0, 1)),
        "crop_pos_y": fn.random.uniform(range=(0, 1)),
        "out_of_bounds_policy": "pad",
    }
    images = fn.crop(fn.resize(images, resize_shorter=resized, antialias=True), **crop)
    masks = fn.crop(fn.resize(masks, resize_shorter=resized, interp_type=types.INTERP_NN), fill_values=255, **crop)
    mirror = fn.random.coin_flip()
    masks = fn.cast(fn.flip(masks, horizontal=mirror), dtype=types.INT64)
    return normalize(fn, types, dtype, images, mirror=mirror), masks


PIPELINES = {
    "seed": heavy,
    "cls": classification,
    "ssl": contrastive,
    "masks": segmentation,
    "randaugment": randaugment,
    "hflip": hflip,
    "lsj": lsj,
    "segmentation": segmentation_preset,
}
"""Name of a pipeline: function that builds DALI's graph from its namespaces, the images' side and the output's dtype."""


def _factor(fn: Any) -> Any:
    return fn.random.uniform(range=(0.6, 1.4))


def normalize(
    fn: Any,
    types: Any,
    dtype: torch.dtype,
    images: Any,
    mirror: Any = 0,
    *,
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
    **crop: Any,
) -> Any:
    """Flip, normalise and convert, the end of all pipelines; a crop too where ``crop`` has its arguments."""
    full = dtype == torch.float32
    return fn.crop_mirror_normalize(
        images,
        mirror=mirror,
        mean=[255 * value for value in mean],
        std=[255 * value for value in std],
        dtype=types.FLOAT if full else types.FLOAT16,
        output_layout="CHW" if full else "HWC",
        **crop,
    )
