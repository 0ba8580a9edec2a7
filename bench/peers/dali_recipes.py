"""Published recipes in NVIDIA DALI, over a batch of one size: those that its operators can express.

Resizes are antialiased, as torchvision's are, and every image draws for itself. DALI jitters brightness, contrast, saturation
and hue in this order, with contrast around mid-grey, and its policies have magnitudes of their own.
"""

from collections.abc import Sequence
from typing import Any

import torch

from bench.data.recipes.classification import OPENAI_MEAN, OPENAI_STD
from bench.peers.dali import AREA, ASPECT, normalize


def _crop(fn: Any, types: Any, images: Any, out: int, area: tuple[float, float] = AREA, *, cubic: bool = False) -> Any:
    interpolation = types.INTERP_CUBIC if cubic else types.INTERP_LINEAR
    settings = {"random_area": area, "random_aspect_ratio": ASPECT, "interp_type": interpolation, "antialias": True}
    return fn.random_resized_crop(images, size=(out, out), **settings)


def _jitter(fn: Any, images: Any, amounts: Sequence[float], hue: float, p: float) -> Any:
    """Jitter of brightness, contrast and saturation by up to ``amounts`` and of hue by a part of the circle, by chance."""
    jittered = fn.random.coin_flip(probability=p)
    brightness, contrast, saturation = (
        fn.random.uniform(range=(1.0 - amount, 1.0 + amount)) * jittered + (1.0 - jittered) for amount in amounts
    )
    degrees = fn.random.uniform(range=(-360 * hue, 360 * hue)) * jittered if hue else 0.0
    return fn.color_twist(images, brightness=brightness, contrast=contrast, saturation=saturation, hue=degrees)


def _grey(fn: Any, images: Any, p: float) -> Any:
    return fn.saturation(images, saturation=1.0 - fn.random.coin_flip(probability=p))


def cropped_and_flipped(
    fn: Any, types: Any, side: int, dtype: torch.dtype, images: Any, *, share: float = 7 / 8, **crop: Any
) -> Any:
    """Random resized crop to ``share`` of the side, and flip: the references, MAE and SimMIM."""
    return normalize(fn, types, dtype, _crop(fn, types, images, round(side * share), **crop), fn.random.coin_flip())


def with_policy(fn: Any, types: Any, side: int, dtype: torch.dtype, images: Any, *, policy: str) -> Any:
    """The references' recipe with a policy of ``--auto-augment``."""
    from nvidia.dali.auto_aug import auto_augment, rand_augment, trivial_augment

    images = _crop(fn, types, images, side * 7 // 8)
    # Policies are conditions on single images, so the flip comes first, as in torchvision's.
    images = fn.flip(images, horizontal=fn.random.coin_flip())
    if policy == "ra":
        images = rand_augment.rand_augment(images, n=2, m=9)
    elif policy == "ta_wide":
        images = trivial_augment.trivial_augment_wide(images)
    else:
        images = auto_augment.auto_augment_image_net(images)
    return normalize(fn, types, dtype, images)


def timm(fn: Any, types: Any, side: int, dtype: torch.dtype, images: Any) -> Any:
    """Timm's recipe for training."""
    images = _jitter(fn, _crop(fn, types, images, side * 7 // 8, cubic=True), (0.4, 0.4, 0.4), 0.0, 1.0)
    return normalize(fn, types, dtype, images, fn.random.coin_flip())


def timm_validation(fn: Any, types: Any, side: int, dtype: torch.dtype, images: Any) -> Any:
    """Timm's recipe for validation."""
    out = side * 7 // 8
    resized = fn.resize(images, resize_shorter=int(out / 0.875), interp_type=types.INTERP_CUBIC, antialias=True)
    return normalize(fn, types, dtype, resized, crop=(out, out))


def open_clip(fn: Any, types: Any, side: int, dtype: torch.dtype, images: Any) -> Any:
    """open_clip's recipe for training, with jitter and grey."""
    images = _jitter(fn, _crop(fn, types, images, side * 7 // 8, (0.9, 1.0), cubic=True), (0.32, 0.32, 0.32), 0.08, 0.8)
    return normalize(fn, types, dtype, _grey(fn, images, 0.2), mean=OPENAI_MEAN, std=OPENAI_STD)


def dino(fn: Any, types: Any, side: int, dtype: torch.dtype, images: Any, *, large: float, small: float) -> Any:
    """Two global and eight local crops of DINOv2 and DINOv3, of parts ``large`` and ``small`` of the side."""
    whole, part = (round(side * large), (0.32, 1.0)), (round(side * small), (0.05, 0.32))
    views = []
    for (out, area), blurred, inverted in [(whole, 1.0, 0.0), (whole, 0.1, 0.2), *[(part, 0.5, 0.0)] * 8]:
        view = _jitter(fn, _crop(fn, types, images, out, area, cubic=True), (0.4, 0.4, 0.2), 0.1, 0.8)
        view = _grey(fn, view, 0.2)
        # A condition, so that only some of the images are blurred.
        if fn.random.coin_flip(probability=blurred, dtype=types.BOOL):
            view = fn.gaussian_blur(view, sigma=fn.random.uniform(range=(0.1, 2.0)), window_size=9)
        if inverted:
            bright = fn.cast(view >= 128, dtype=types.UINT8) * fn.random.coin_flip(probability=inverted, dtype=types.UINT8)
            view = fn.cast(view * (1 - bright) + (255 - view) * bright, dtype=types.UINT8)
        views.append(normalize(fn, types, dtype, view, fn.random.coin_flip()))
    return tuple(views)


def sim_clr(fn: Any, types: Any, side: int, dtype: torch.dtype, images: Any) -> Any:
    """SimCLR's recipe, for both views."""
    views = []
    for _ in range(2):
        view = _grey(fn, _jitter(fn, _crop(fn, types, images, side * 7 // 8), (0.8, 0.8, 0.8), 0.2, 0.8), 0.2)
        view = fn.gaussian_blur(view, sigma=fn.random.uniform(range=(0.1, 2.0)), window_size=3)
        views.append(normalize(fn, types, dtype, view, fn.random.coin_flip(), mean=(0.0,) * 3, std=(1.0,) * 3))
    return tuple(views)
