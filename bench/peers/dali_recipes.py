"""Published recipes that NVIDIA DALI's operators can express, on batches of images of one size.

Resizes are antialiased, as torchvision's are, and parameters are drawn per image. DALI jitters brightness, contrast, saturation
and hue in this order, with contrast around mid-grey. The magnitudes of its policies differ from torchvision's.
"""

from collections.abc import Sequence
from typing import Any

import torch

from bench.data.recipes.classification import OPENAI_MEAN, OPENAI_STD
from bench.peers.dali import AREA, ASPECT, normalize


def _resized_crop(fn: Any, types: Any, images: Any, out: int, area: tuple[float, float] = AREA, *, cubic: bool = False) -> Any:
    interpolation = types.INTERP_CUBIC if cubic else types.INTERP_LINEAR
    arguments = {"random_area": area, "random_aspect_ratio": ASPECT, "interp_type": interpolation, "antialias": True}
    return fn.random_resized_crop(images, size=(out, out), **arguments)


def _jitter(fn: Any, images: Any, amounts: Sequence[float], hue: float, p: float) -> Any:
    """With probability ``p``, jitter brightness, contrast and saturation by up to ``amounts``, hue by up to ``hue`` turns."""
    apply_jitter = fn.random.coin_flip(probability=p)
    brightness, contrast, saturation = (
        fn.random.uniform(range=(1.0 - amount, 1.0 + amount)) * apply_jitter + (1.0 - apply_jitter) for amount in amounts
    )
    degrees = fn.random.uniform(range=(-360 * hue, 360 * hue)) * apply_jitter if hue else 0.0
    return fn.color_twist(images, brightness=brightness, contrast=contrast, saturation=saturation, hue=degrees)


def _grayscale(fn: Any, images: Any, p: float) -> Any:
    return fn.saturation(images, saturation=1.0 - fn.random.coin_flip(probability=p))


def crop_and_flip(fn: Any, types: Any, side: int, dtype: torch.dtype, images: Any, *, share: float = 7 / 8, **crop: Any) -> Any:
    """Recipes of torchvision's references, MAE and SimMIM: random resized crop to ``share`` of the side, and flip."""
    return normalize(fn, types, dtype, _resized_crop(fn, types, images, round(side * share), **crop), fn.random.coin_flip())


def with_policy(fn: Any, types: Any, side: int, dtype: torch.dtype, images: Any, *, policy: str) -> Any:
    """Recipe of torchvision's references with a policy of ``--auto-augment``."""
    from nvidia.dali.auto_aug import auto_augment, rand_augment, trivial_augment

    images = _resized_crop(fn, types, images, side * 7 // 8)
    # The flip precedes the policy, as in torchvision's recipe.
    images = fn.flip(images, horizontal=fn.random.coin_flip())
    if policy == "ra":
        images = rand_augment.rand_augment(images, n=2, m=9)
    elif policy == "ta_wide":
        images = trivial_augment.trivial_augment_wide(images)
    else:
        images = auto_augment.auto_augment_image_net(images)
    return normalize(fn, types, dtype, images)


def timm(fn: Any, types: Any, side: int, dtype: torch.dtype, images: Any) -> Any:
    """Recipe of timm for training."""
    images = _jitter(fn, _resized_crop(fn, types, images, side * 7 // 8, cubic=True), (0.4, 0.4, 0.4), 0.0, 1.0)
    return normalize(fn, types, dtype, images, fn.random.coin_flip())


def timm_validation(fn: Any, types: Any, side: int, dtype: torch.dtype, images: Any) -> Any:
    """Recipe of timm for validation."""
    out = side * 7 // 8
    resized_images = fn.resize(images, resize_shorter=int(out / 0.875), interp_type=types.INTERP_CUBIC, antialias=True)
    return normalize(fn, types, dtype, resized_images, crop=(out, out))


def open_clip(fn: Any, types: Any, side: int, dtype: torch.dtype, images: Any) -> Any:
    """Recipe of open_clip for training, with jitter and grayscale."""
    images = _jitter(fn, _resized_crop(fn, types, images, side * 7 // 8, (0.9, 1.0), cubic=True), (0.32, 0.32, 0.32), 0.08, 0.8)
    return normalize(fn, types, dtype, _grayscale(fn, images, 0.2), mean=OPENAI_MEAN, std=OPENAI_STD)


def dino(fn: Any, types: Any, side: int, dtype: torch.dtype, images: Any, *, large: float, small: float) -> Any:
    """Recipe of DINOv2 and DINOv3: two global crops to ``large`` of the side, and eight local crops to ``small`` of it."""
    global_crop, local_crop = (round(side * large), (0.32, 1.0)), (round(side * small), (0.05, 0.32))
    views = []
    for (out, area), blur_p, solarize_p in [(global_crop, 1.0, 0.0), (global_crop, 0.1, 0.2), *[(local_crop, 0.5, 0.0)] * 8]:
        view = _jitter(fn, _resized_crop(fn, types, images, out, area, cubic=True), (0.4, 0.4, 0.2), 0.1, 0.8)
        view = _grayscale(fn, view, 0.2)
        # A condition, so that only the drawn images are blurred.
        if fn.random.coin_flip(probability=blur_p, dtype=types.BOOL):
            view = fn.gaussian_blur(view, sigma=fn.random.uniform(range=(0.1, 2.0)), window_size=9)
        if solarize_p:
            solarize_mask = fn.cast(view >= 128, dtype=types.UINT8) * fn.random.coin_flip(
                probability=solarize_p, dtype=types.UINT8
            )
            view = fn.cast(view * (1 - solarize_mask) + (255 - view) * solarize_mask, dtype=types.UINT8)
        views.append(normalize(fn, types, dtype, view, fn.random.coin_flip()))
    return tuple(views)


def sim_clr(fn: Any, types: Any, side: int, dtype: torch.dtype, images: Any) -> Any:
    """Recipe of SimCLR, for two views."""
    views = []
    for _ in range(2):
        view = _grayscale(fn, _jitter(fn, _resized_crop(fn, types, images, side * 7 // 8), (0.8, 0.8, 0.8), 0.2, 0.8), 0.2)
        view = fn.gaussian_blur(view, sigma=fn.random.uniform(range=(0.1, 2.0)), window_size=3)
        views.append(normalize(fn, types, dtype, view, fn.random.coin_flip(), mean=(0.0,) * 3, std=(1.0,) * 3))
    return tuple(views)
