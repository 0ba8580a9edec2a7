"""Augmentation pipelines in NVIDIA DALI: on one batch in memory, and on the batches of a DataLoader.

DALI reads images (B, H, W, C) through ``external_source``, without a copy where the same batch is repeated. It draws for every
image, prepares two batches ahead on its own threads and streams (its default), and returns the result as a view on the current
stream. It has no bfloat16, so half-precision pipelines return float16, with as many bytes. Crops and resizes are antialiased
only on request, as in Kornia.
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
    """Return a function that augments ``images`` at each call.

    Args:
        body: Function that builds DALI's graph; see ``PIPELINES``.
        images: (B, C, H, W) uint8. On a CPU, DALI's CPU operators run.
        masks: (B, 1, H, W) uint8, or ``None``.
        dtype: Data type of the augmented images; bfloat16 becomes float16.
        targets: One dict per image with ``boxes`` (n, 4), corners in pixels. The result has padded boxes (B, n, 4).

    Raises:
        ImportError: If DALI is not installed.
    """
    from nvidia.dali import fn, pipeline_def, types

    device = images.device
    device_name = "gpu" if device.type == "cuda" else "cpu"
    side = images.shape[-1]
    # Converted to DALI's layout once, not per call. CPU operators take NumPy arrays.
    sources = [tensor.permute(0, 2, 3, 1).contiguous() for tensor in (images, masks) if tensor is not None]
    if device_name == "cpu":
        sources = [tensor.numpy() for tensor in sources]
    boxes = [target["boxes"].cpu().numpy() for target in targets or ()]

    @pipeline_def(**_settings(len(images), device))
    def pipeline() -> Any:
        inputs = fn.external_source(
            source=lambda: tuple(sources),
            num_outputs=len(sources),
            device=device_name,
            layout="HWC",
            dtype=types.UINT8,
            ndim=3,
            no_copy=True,
        )
        if not boxes:
            return body(fn, types, side, dtype, *inputs)
        # As in DALI's examples, boxes are transformed on the host and padded.
        augmented, augmented_boxes = body(
            fn, types, side, dtype, *inputs, fn.external_source(source=lambda: boxes, dtype=types.FLOAT, ndim=2)
        )
        augmented_boxes = fn.pad(augmented_boxes)
        return augmented, augmented_boxes.gpu() if device_name == "gpu" else augmented_boxes

    dali_pipeline = pipeline()
    dali_pipeline.build()

    def call() -> Any:
        outputs = _run_pipeline(dali_pipeline, device)
        return outputs[0] if len(outputs) == 1 else outputs

    return call


def build_ragged(images: Sequence[Tensor], side: int, *, antialias: bool, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that augments images of different sizes at each call, by the pipeline ``cls``.

    Args:
        images: Images (H, W, C) uint8, on ``device`` or page-locked on the host. From the host, DALI copies them at each call.
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
    # One list for all calls, so that no call converts tensors one by one.
    if on_host:
        dali_images = [tensors.TensorCPU(image.numpy(), "HWC", is_pinned=image.is_pinned()) for image in images]
        batch = tensors.TensorListCPU(dali_images, "HWC", contiguous=False)
    else:
        batch = tensors.TensorListGPU([tensors.TensorGPU(image, "HWC") for image in images], "HWC", contiguous=False)

    @pipeline_def(**_settings(len(images), device))
    def pipeline() -> Any:
        inputs = fn.external_source(
            source=lambda: batch, device="cpu" if on_host else "gpu", layout="HWC", dtype=types.UINT8, ndim=3, no_copy=True
        )
        if on_host and device.type == "cuda":
            inputs = inputs.gpu()
        # The pipeline crops to seven eighths of its argument, rounded down.
        return classification(fn, types, -(-side * 8 // 7), torch.bfloat16, inputs, antialias=antialias)

    dali_pipeline = pipeline()
    dali_pipeline.build()

    # The default argument keeps the images alive, since DALI's list only refers to their memory.
    def call(_images: Sequence[Tensor] = images) -> Tensor:
        return _run_pipeline(dali_pipeline, device)[0]

    return call


class Batches:
    """Batches of a loader, augmented by DALI: images (B, C, H, W) float32 on the device, and unchanged labels.

    Args:
        name: Key of ``PIPELINES``, for a pipeline without masks.
        loader: Iterable of (images (B, C, H, W) uint8, labels), with batches of ``batch_size`` images.
        batch_size: Number of images in a batch.
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
        def pipeline(next_images: Callable[[], Any]) -> Any:
            inputs = fn.external_source(source=next_images, device="cpu", layout="CHW", dtype=types.UINT8, ndim=3)
            if on_gpu:
                inputs = inputs.gpu()
            return body(fn, types, side, torch.float32, fn.transpose(inputs, perm=[1, 2, 0]))

        self._pipeline = pipeline

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        source: Iterator[tuple[Tensor, Tensor]] | None = iter(self.loader)
        labels: deque[Tensor] = deque()

        def next_images() -> Any:
            # DALI pulls batches ahead: their labels are queued until their images come out.
            assert source is not None
            images, batch_labels = next(source)
            labels.append(batch_labels)
            return images.numpy()

        dali_pipeline = self._pipeline(next_images)
        dali_pipeline.build()
        try:
            while True:
                (images,) = _run_pipeline(dali_pipeline, self.device)
                yield images, labels.popleft()
        finally:
            # A pipeline is part of a reference cycle and refers to its loader. If the garbage collector frees a DataLoader, its
            # queues are gone before it can stop its workers, and it waits five seconds for each worker.
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


def _run_pipeline(dali_pipeline: Any, device: torch.device) -> list[Tensor]:
    # With a stream, run() returns before the batch is ready, and the stream waits.
    outputs = dali_pipeline.run(torch.cuda.current_stream(device)) if device.type == "cuda" else dali_pipeline.run()
    tensors = [torch.from_dlpack(output.as_tensor()) for output in outputs]
    # float32 images are (B, C, H, W) already, and boxes are (B, n, 4). Half-precision images and masks are (B, H, W, C).
    return [output if output.dtype == torch.float32 else output.permute(0, 3, 1, 2) for output in tensors]


def heavy(fn: Any, types: Any, side: int, dtype: torch.dtype, images: Any) -> Any:
    """Pipeline ``seed``: random crop, resize, rotation, blur, normalisation."""
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
    """Pipeline ``cls``: random resized crop, jitter, flip, normalisation."""
    images = fn.random_resized_crop(
        images, size=(side * 7 // 8,) * 2, random_area=AREA, random_aspect_ratio=ASPECT, antialias=antialias
    )
    return jitter_and_flip(fn, types, dtype, images)


def jitter_and_flip(fn: Any, types: Any, dtype: torch.dtype, images: Any) -> Any:
    """Transforms of ``cls`` after the crop: jitter, flip, normalisation."""
    images = fn.color_twist(images, brightness=_jitter_factor(fn), contrast=_jitter_factor(fn), saturation=_jitter_factor(fn))
    return normalize(fn, types, dtype, images, mirror=fn.random.coin_flip())


def contrastive(fn: Any, types: Any, side: int, dtype: torch.dtype, images: Any) -> Any:
    """Pipeline ``ssl``: random resized crop; jitter with hue, grey and blur, each for a share of the images; flip."""
    images = fn.random_resized_crop(
        images, size=(side * 7 // 8,) * 2, random_area=AREA, random_aspect_ratio=ASPECT, antialias=False
    )
    apply_jitter = fn.random.coin_flip(probability=0.8)
    images = fn.color_twist(
        images,
        brightness=_jitter_factor(fn) * apply_jitter + (1.0 - apply_jitter),
        contrast=_jitter_factor(fn) * apply_jitter + (1.0 - apply_jitter),
        saturation=_jitter_factor(fn) * apply_jitter + (1.0 - apply_jitter),
        # In degrees: a tenth of the circle, which is 0.1 in Kornia and torchvision.
        hue=fn.random.uniform(range=(-36.0, 36.0)) * apply_jitter,
    )
    images = fn.saturation(images, saturation=1.0 - fn.random.coin_flip(probability=0.2))
    # A condition, so that only the drawn images are blurred.
    if fn.random.coin_flip(probability=0.5, dtype=types.BOOL):
        images = fn.gaussian_blur(images, sigma=fn.random.uniform(range=(0.1, 2.0)), window_size=23)
    return normalize(fn, types, dtype, images, mirror=fn.random.coin_flip())


def segmentation(fn: Any, types: Any, side: int, dtype: torch.dtype, images: Any, masks: Any) -> Any:
    """Pipeline ``masks``: as ``cls``, with the same crop and flip for masks."""
    start, extent = fn.random_crop_generator([side, side], random_area=AREA, random_aspect_ratio=ASPECT)
    start = fn.cast(start, dtype=types.FLOAT)
    end = start + fn.cast(extent, dtype=types.FLOAT)
    size = (side * 7 // 8,) * 2
    images = fn.resize(images, size=size, roi_start=start, roi_end=end, antialias=False)
    masks = fn.resize(masks, size=size, roi_start=start, roi_end=end, interp_type=types.INTERP_NN)
    images = fn.color_twist(images, brightness=_jitter_factor(fn), contrast=_jitter_factor(fn), saturation=_jitter_factor(fn))
    mirror = fn.random.coin_flip()
    return normalize(fn, types, dtype, images, mirror=mirror), fn.flip(masks, horizontal=mirror)


def randaugment(fn: Any, types: Any, _side: int, dtype: torch.dtype, images: Any) -> Any:
    """Pipeline ``randaugment``: DALI's RandAugment, which draws the ops of every image separately."""
    from nvidia.dali.auto_aug import rand_augment

    return normalize(fn, types, dtype, rand_augment.rand_augment(images, n=2, m=10))


def hflip(fn: Any, types: Any, side: int, _dtype: torch.dtype, images: Any, boxes: Any) -> Any:
    """Preset ``hflip`` of torchvision: flip and conversion to float32."""
    mirror = fn.random.coin_flip()
    images = fn.crop_mirror_normalize(images, mirror=mirror, std=255.0, dtype=types.FLOAT, output_layout="CHW")
    return images, fn.bb_flip(boxes / side, ltrb=True, horizontal=mirror) * side


def lsj(fn: Any, types: Any, side: int, dtype: torch.dtype, images: Any, boxes: Any) -> Any:
    """Preset ``lsj`` of torchvision: resize by a random scale, crop or pad, ``hflip``."""
    from nvidia.dali import math

    resized_side = math.floor(fn.random.uniform(range=(0.1, 2.0)) * side)
    images = fn.resize(images, resize_shorter=resized_side, antialias=True)
    # Negative where the image is smaller than the crop: then the crop is padded.
    top, left = (math.floor(fn.random.uniform(range=(0, 1)) * (resized_side - side + 1)) for _ in range(2))
    start = fn.cast(fn.stack(top, left), dtype=types.INT32)
    images = fn.slice(
        images, start=start, shape=[side, side], axis_names="HW", out_of_bounds_policy="pad", fill_values=[123, 117, 104]
    )
    boxes = boxes * (resized_side / side) - fn.stack(left, top, left, top)
    return hflip(fn, types, side, dtype, images, math.clamp(boxes, 0.0, float(side)))


def segmentation_preset(fn: Any, types: Any, side: int, dtype: torch.dtype, images: Any, masks: Any) -> Any:
    """Preset of torchvision for segmentation: resize by a random scale, crop or pad, flip and normalise."""
    out = side * 12 // 13
    resized_side = fn.random.uniform(range=(side // 2, side * 2))
    crop = {
        "crop": (out, out),
        "crop_pos_x": fn.random.uniform(range=(0, 1)),
        "crop_pos_y": fn.random.uniform(range=(0, 1)),
        "out_of_bounds_policy": "pad",
    }
    images = fn.crop(fn.resize(images, resize_shorter=resized_side, antialias=True), **crop)
    masks = fn.crop(fn.resize(masks, resize_shorter=resized_side, interp_type=types.INTERP_NN), fill_values=255, **crop)
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
"""Name of a pipeline: function that builds DALI's graph from (fn, types, side of the images, dtype of the output, inputs)."""


def _jitter_factor(fn: Any) -> Any:
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
    """Flip, normalise and convert images: the last operator of every pipeline. ``crop`` has arguments of an optional crop."""
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
