"""Image processors of transformers for images of different sizes: the processor itself, and gpuaug.

    python -m bench run processors

The processors of Qwen2-VL and SigLIP2 with their default settings. Needs transformers. Photographs as on the web, JPEG, with a
median side of 450 pixels. Cases:

Qwen2-VL, SigLIP2         decoded uint8 images on the device, all of different sizes. Rows: the processor, called with the
                          images on the device; gpuaug.fuse of the processor
…, from files             from files in the page cache to patches on the device. Rows: workers that decode with PIL and run the
                          processor on a CPU, as the usual collate function of a Trainer; workers that decode, and the processor
                          on the device; gpuaug: collate_encoded, DecodeStage, and the fused processor
training step             from files through a forward and backward pass of a random Qwen2-VL of about 500 M parameters
                          (``--width`` 1024, ``--layers`` 16), in bfloat16, with AdamW. Rows: the workers above, gpuaug, and the
                          ceiling: batches of patches that are on the device already

Rates are images per second. ``host_ms`` and ``gpu_ms``: time of one call, on the calling thread with an idle device, and on the
device.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import gpuaug
from bench.data import loaders, web_images
from bench.harness import call_rows, flags, measurement
from bench.harness.loops import autocast_dtype
from bench.harness.optional_rows import OptionalRow
from gpuaug.benchkit.windows import Variant

QWEN = "Qwen2-VL"
CLASSES = {QWEN: "Qwen2VLImageProcessor", "SigLIP2": "Siglip2ImageProcessor"}
OUTPUTS = {
    QWEN: ("pixel_values", "image_grid_thw"),
    "SigLIP2": ("pixel_values", "pixel_attention_mask", "spatial_shapes"),
}
"""Names of the outputs of each processor."""

TRANSFORMERS = "transformers"
WORKERS = "transformers, workers"
DEVICE = "transformers, workers decode"
GPUAUG = "gpuaug"
RESIDENT = "resident"
DECODING = "decoding alone"

TEXT_TOKENS = 32
"""Tokens of text per image in the training step."""

_IMAGE_TOKEN = 1
_VOCABULARY = 32000
_BATCHES = 4
"""Different batches that all rows of a case repeat, in one order."""

Batch = dict[str, Tensor]


@cache
def processor(name: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise SystemExit(
            "The suite processors cannot run, because transformers is not installed. Run pip install transformers."
        ) from error
    return getattr(transformers, CLASSES[name])()


class Files(Dataset):
    """Paths of image files, or with ``decodes`` images (3, h, w)."""

    def __init__(self, count: int, *, decodes: bool) -> None:
        # In the order of the numbers in their names, so that consecutive files are of different photographs and sizes.
        self.paths = sorted(web_images.make("plain", count=count).glob("*/*.jpg"), key=lambda path: path.name)
        self.decodes = decodes

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        path = self.paths[index % len(self.paths)]
        if not self.decodes:
            return path
        with Image.open(path) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def batches_of(options: Namespace, batch_size: int, *, decodes: bool, collate: Callable[[list[Any]], Any]) -> DataLoader:
    """Return a loader that repeats the first ``_BATCHES`` batches, in an epoch that is longer than every measurement."""
    order = list(range(_BATCHES * batch_size)) * 10_000
    return DataLoader(
        Files(options.files, decodes=decodes),
        batch_size,
        sampler=order,
        num_workers=options.workers,
        collate_fn=collate,
        persistent_workers=options.workers > 0,
        pin_memory=decodes and options.device.type == "cuda",
    )


def text_of(grids: Tensor) -> Batch:
    """Return token ids, labels and positions of a packed row, by the grids of its images."""
    ids: list[Tensor] = []
    for count in (grids.prod(1) // 4).tolist():
        ids += [torch.full((count,), _IMAGE_TOKEN), torch.arange(2, 2 + TEXT_TOKENS)]
    row = torch.cat(ids)[None]
    labels = torch.where(row == _IMAGE_TOKEN, -100, row)
    return {"input_ids": row, "labels": labels, "position_ids": torch.arange(row.shape[1]).expand(3, 1, -1).contiguous()}


def processed(name: str, images: Sequence[Tensor]) -> Batch:
    """Return the outputs of transformers' processor, and for Qwen2-VL the text."""
    outputs = dict(processor(name)(list(images), return_tensors="pt"))
    return outputs | text_of(outputs["image_grid_thw"]) if name == QWEN else outputs


def encoded_batch(name: str, pixels: gpuaug.FusedProcessor, paths: Sequence[Any]) -> dict[str, Any]:
    """Return the files of a batch, and for Qwen2-VL the text, for which only the headers are read."""
    encoded = gpuaug.collate_encoded(paths)
    return {"images": encoded} | (text_of(pixels.grids(encoded)) if name == QWEN else {})


def as_list(images: list[Tensor]) -> list[Tensor]:
    return images


def on_device(batch: Batch, options: Namespace) -> Batch:
    return {key: value.to(options.device, non_blocking=True) for key, value in batch.items()}


def decoded_rows(name: str, options: Namespace, batch_size: int, _stack: ExitStack) -> list[OptionalRow]:
    files = Files(options.files, decodes=True)
    by_size = {tuple(image.shape): image for image in map(files.__getitem__, range(len(files)))}
    images = list(by_size.values())[:batch_size]
    if len(images) < batch_size:
        raise SystemExit(
            f"--files must be large enough for {batch_size} images of different sizes, got {options.files}. Raise it."
        )
    ragged = gpuaug.collate_ragged([image.permute(1, 2, 0).contiguous().numpy() for image in images]).to(options.device)
    images = [image.to(options.device) for image in images]
    pixels = gpuaug.fuse(processor(name), ragged=True)
    return [
        call_rows.call_row(TRANSFORMERS, lambda: processor(name)(images, return_tensors="pt"), batch_size),
        call_rows.call_row(GPUAUG, lambda: pixels(ragged), batch_size, launches=call_rows.FEW_LAUNCHES),
    ]


def row(
    label: str, name: str, options: Namespace, batch_size: int, stack: ExitStack, step: Callable[[Batch], object]
) -> Variant:
    """Return a row that passes batches on the device to ``step``."""
    batches: Iterable[Any]
    loader: DataLoader
    if label == GPUAUG:
        pixels: Any = gpuaug.fuse(processor(name), ragged=True)
        loader = batches_of(options, batch_size, decodes=False, collate=partial(encoded_batch, name, pixels))
        output = gpuaug.TransformStage(pixels, on="images", into=OUTPUTS[name])
        streamed = gpuaug.StreamedLoader(loader, [gpuaug.DecodeStage(), output], device=options.device, depth=loaders.DEPTH)
        stack.callback(streamed.close)
        batches = ({key: value for key, value in batch.items() if key != "images"} for batch in streamed)
    elif label == RESIDENT:
        loader = batches_of(options, batch_size, decodes=True, collate=partial(processed, name))
        fixed = [on_device(batch, options) for batch, _ in zip(loader, range(_BATCHES), strict=False)]
        batches = loaders.repeat_batches(fixed)
    elif label == WORKERS:
        loader = batches_of(options, batch_size, decodes=True, collate=partial(processed, name))
        batches = (on_device(batch, options) for batch in loader)
    else:
        loader = batches_of(options, batch_size, decodes=True, collate=as_list)
        batches = (processed(name, [image.to(options.device, non_blocking=True) for image in images]) for images in loader)

    def steps() -> Iterator[int]:
        for batch in batches:
            step(batch)
            yield batch_size

    return Variant(label, steps, loaders.queue_length(loader))


def file_rows(name: str, options: Namespace, batch_size: int, stack: ExitStack) -> list[OptionalRow]:
    def no_step(batch: Batch) -> None:
        """Step of a loop that only makes patches."""

    files = Files(options.files, decodes=False)
    numbers = [range(first, first + batch_size) for first in range(0, _BATCHES * batch_size, batch_size)]
    batches = [[gpuaug.collate_encoded([files[index] for index in part])] for part in numbers]
    return [
        *(row(label, name, options, batch_size, stack, no_step) for label in (WORKERS, DEVICE, GPUAUG)),
        loaders.decoding_alone(DECODING, batches, options, batch_size, stack),
    ]


class Step:
    """Training step of a random Qwen2-VL: all images of a batch, with text after each, in one row."""

    def __init__(self, options: Namespace) -> None:
        import transformers

        width = options.width
        heads = max(width // 64, 1)
        half = width // heads // 2
        shares = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
        config = transformers.Qwen2VLConfig(
            text_config={
                "hidden_size": width,
                "intermediate_size": 4 * width,
                "num_hidden_layers": options.layers,
                "num_attention_heads": heads,
                "num_key_value_heads": heads,
                "vocab_size": _VOCABULARY,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": shares},
            },
            vision_config={"depth": options.layers, "embed_dim": width, "hidden_size": width, "num_heads": heads},
            image_token_id=_IMAGE_TOKEN,
        )
        self.model: nn.Module = transformers.Qwen2VLForConditionalGeneration(config).to(options.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=options.device.type == "cuda")
        self.dtype = autocast_dtype(options.device)
        self.device_type = options.device.type

    def __call__(self, batch: Batch) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device_type, self.dtype, enabled=self.dtype is not None):
            loss = self.model(**batch, use_cache=False).loss
        loss.backward()
        self.optimizer.step()


def step_rows(options: Namespace, batch_size: int, stack: ExitStack) -> list[OptionalRow]:
    step = Step(options)
    return [row(label, QWEN, options, batch_size, stack, step) for label in (WORKERS, GPUAUG, RESIDENT)]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("processors", __doc__, batch="16,64", seconds=0.6, repeats=3, spare=8)
    parser.add_argument("--cases", help="separated by semicolons (default: all)")
    parser.add_argument("--files", type=int, default=512, help="number of files (default: %(default)s)")
    parser.add_argument("--width", type=int, default=1024, help="width of the model of the step (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=16, help="layers of each of its halves (default: %(default)s)")
    options = flags.parse(parser, argv)
    cases: list[tuple[dict[str, Any], Any]] = []
    for size in options.batch:
        for name in CLASSES:
            cases.append(({"case": name, "batch_size": size}, partial(decoded_rows, name, options, size)))
            cases.append(({"case": f"{name}, from files", "batch_size": size}, partial(file_rows, name, options, size)))
    cases.append(({"case": "training step", "batch_size": options.batch[0]}, partial(step_rows, options, options.batch[0])))
    if options.cases:
        cases = [case for case in cases if case[0]["case"] in options.cases.split(";")]
    return measurement.measure(
        "processors",
        options,
        cases,
        baseline=(TRANSFORMERS, WORKERS),
        ours=(GPUAUG,),
        ceilings=(RESIDENT, DECODING),
        figures=partial(call_rows.batch_figures, device=options.device),
    )
