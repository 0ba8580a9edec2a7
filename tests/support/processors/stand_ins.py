"""Stand-ins for transformers' image processors, for tests without transformers.

They have the settings under the same names, and return the result from plain torch, image by image.
"""

import math
import sys
from types import SimpleNamespace

import torch
from torch.nn import functional as F

from gpuaug.fusion.processors.read import read

TESTED = "5.24.0"
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
FOLDERS = {
    "Qwen2VLImageProcessor": "qwen2_vl",
    "Siglip2ImageProcessor": "siglip2",
    "SiglipImageProcessor": "siglip",
    "CLIPImageProcessor": "clip",
    "ViTImageProcessor": "vit",
    "DINOv3ViTImageProcessor": "dinov3_vit",
    "PixtralImageProcessor": "pixtral",
}
SQUARE = {"height": 32, "width": 48}
SETTINGS = {
    "Qwen2VLImageProcessor": {
        "size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 20},
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
    },
    "Siglip2ImageProcessor": {"patch_size": 16, "max_num_patches": 21, "resample": 2},
    "SiglipImageProcessor": {"size": SQUARE},
    "CLIPImageProcessor": {
        "size": {"shortest_edge": 40},
        "crop_size": {"height": 36, "width": 52},
        "do_center_crop": True,
    },
    "ViTImageProcessor": {"size": SQUARE, "resample": 2},
    "DINOv3ViTImageProcessor": {"size": SQUARE, "resample": 2},
    "PixtralImageProcessor": {"size": {"longest_edge": 96}, "patch_size": {"height": 16, "width": 16}, "do_pad": True},
}
"""Settings of each processor that give small images."""

NAMES = list(FOLDERS)


def stand_in(name, monkeypatch=None, *, version=TESTED, call=None, **settings):
    """An object whose type has the name and the module of a processor, in ``version`` of transformers."""
    if monkeypatch is not None:
        monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__=version))
    folder = FOLDERS.get(name, name.lower())
    kind = type(
        name,
        (),
        {
            "__module__": f"transformers.models.{folder}.image_processing_{folder}",
            "__call__": lambda self, images, return_tensors: (call or expected)(self, images),
        },
    )
    processor = kind()
    defaults = {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255, "resample": 3}
    values = {**defaults, "image_mean": MEAN, "image_std": STD, **SETTINGS.get(name, {}), **settings}
    for key, value in values.items():
        setattr(processor, key, value)
    return processor


def expected(processor, images):
    """Result of the processor for uint8 images (3, h, w), by name."""
    name = type(processor).__name__
    return {
        "Qwen2VLImageProcessor": _qwen,
        "Siglip2ImageProcessor": _siglip2,
        "PixtralImageProcessor": _pixtral,
    }.get(name, _one_size)(processor, images)


def resized(processor, image, size):
    """Resize to ``size`` with an antialiasing filter, in float32, and round to bytes."""
    if tuple(image.shape[1:]) == tuple(size):
        return image.float()
    mode = "bicubic" if processor.resample == 3 else "bilinear"
    image = F.interpolate(image[None].float(), tuple(size), mode=mode, antialias=True)[0]
    return image if type(processor).__name__.startswith("DINO") else image.clamp(0, 255).round()


def normalized(processor, image):
    """Rescale and normalize, as transformers does in one step."""
    mean, std = (
        torch.tensor(numbers)[:, None, None] / processor.rescale_factor
        for numbers in (processor.image_mean, processor.image_std)
    )
    return (image - mean) / std


def _qwen(processor, images):
    patches, grids = [], []
    size, merge, factor = processor.patch_size, processor.merge_size, processor.patch_size * processor.merge_size
    least, most = processor.size["shortest_edge"], processor.size["longest_edge"]
    for image in images:
        height, width = image.shape[1:]
        sides = [round(side / factor) * factor for side in (height, width)]
        if math.prod(sides) > most:
            beta = math.sqrt((height * width) / most)
            sides = [max(factor, math.floor(side / beta / factor) * factor) for side in (height, width)]
        elif math.prod(sides) < least:
            beta = math.sqrt(least / (height * width))
            sides = [math.ceil(side * beta / factor) * factor for side in (height, width)]
        values = normalized(processor, resized(processor, image, sides))
        rows, columns = (side // size for side in sides)
        values = values.view(3, rows // merge, merge, size, columns // merge, merge, size).permute(1, 4, 2, 5, 0, 3, 6)
        values = values[..., None, :, :].expand(*values.shape[:5], processor.temporal_patch_size, size, size)
        patches.append(values.reshape(rows * columns, -1))
        grids.append([1, rows, columns])
    return {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}


def siglip2_grid(sides, size, most):
    """Patches along height and width of SigLIP2's processor, by bisection of the scale."""
    low, high = 1e-6, 100.0
    while high - low >= 1e-5:
        scale = (low + high) / 2
        counts = [max(1, math.ceil(side * scale / size)) for side in sides]
        low, high = (scale, high) if math.prod(counts) <= most else (low, scale)
    return [max(1, math.ceil(side * low / size)) for side in sides]


def _siglip2(processor, images):
    size, most = processor.patch_size, processor.max_num_patches
    result = {"pixel_values": [], "pixel_attention_mask": [], "spatial_shapes": []}
    for image in images:
        rows, columns = siglip2_grid(image.shape[1:], size, most)
        values = normalized(processor, resized(processor, image, (rows * size, columns * size)))
        values = values.view(3, rows, size, columns, size).permute(1, 3, 2, 4, 0).reshape(rows * columns, -1)
        result["pixel_values"].append(F.pad(values, (0, 0, 0, most - len(values))))
        result["pixel_attention_mask"].append((torch.arange(most) < len(values)).int())
        result["spatial_shapes"].append(torch.tensor([rows, columns]))
    return {key: torch.stack(values) for key, values in result.items()}


def _one_size(processor, images):
    values = []
    for image in images:
        height, width = image.shape[1:]
        size = processor.size.get("height"), processor.size.get("width")
        if (short := processor.size.get("shortest_edge")) is not None:
            long = int(short * max(height, width) / min(height, width))
            size = (long, short) if width <= height else (short, long)
        image = resized(processor, image, size)
        if getattr(processor, "do_center_crop", False):
            crop = processor.crop_size["height"], processor.crop_size["width"]
            pads = [max(side - old, 0) for side, old in zip(crop, image.shape[1:], strict=True)]
            image = F.pad(image, (pads[1] // 2, (pads[1] + 1) // 2, pads[0] // 2, (pads[0] + 1) // 2))
            top, left = ((old - side) // 2 for side, old in zip(crop, image.shape[1:], strict=True))
            image = image[:, top : top + crop[0], left : left + crop[1]]
        values.append(normalized(processor, image))
    return {"pixel_values": torch.stack(values)}


def _pixtral(processor, images):
    values, most, size = [], processor.size["longest_edge"], processor.patch_size["height"]
    for image in images:
        sides = image.shape[1:]
        ratio = max(side / most for side in sides)
        sides = [math.floor(side / ratio) if ratio > 1 else side for side in sides]
        values.append(normalized(processor, resized(processor, image, [-(-side // size) * size for side in sides])))
    sizes = torch.tensor([value.shape[1:] for value in values])
    height, width = sizes.amax(0).tolist()
    padded = [F.pad(value, (0, width - value.shape[2], 0, height - value.shape[1])) for value in values]
    return {"pixel_values": torch.stack(padded), "image_sizes": sizes}


def read_stand_in(name, **settings):
    """Name, family and arithmetic of a stand-in, as ``gpuaug.fuse`` reads them."""
    return read(stand_in(name, **settings))
