"""Compositions of ops that move pixels, padding among them, and how each library does them one by one."""

from functools import partial
from itertools import product

import kornia.augmentation as K
import torch
from hypothesis import strategies as st
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

NEAREST, BILINEAR = InterpolationMode.NEAREST_EXACT, InterpolationMode.BILINEAR

CHANCES = st.sampled_from([0.0, 0.5, 1.0])
SIDES = st.tuples(st.integers(1, 14), st.integers(1, 14))
SMALL = st.tuples(st.integers(3, 8), st.integers(3, 8))
AROUND = st.integers(0, 9) | st.tuples(*[st.integers(0, 9)] * 4).map(list)


def made(kind, **options):
    return st.builds(kind, **options)


def composed(anything, padded_crop):
    """Lists of modules with a crop among them that may see little but padding."""
    parts = st.tuples(st.lists(anything, max_size=2), padded_crop, st.lists(anything, min_size=1, max_size=3))
    return parts.map(lambda lists: [*lists[0], lists[1], *lists[2]])


def torchvision_pads(kind, **options):
    """Steps that pad: by two constants, by the edge, by a reflection."""
    constant = made(kind, fill=st.sampled_from([0.25, 0.25, 0.75]), padding_mode=st.just("constant"), **options)
    return st.one_of(constant, *(made(kind, padding_mode=st.just(mode), **options) for mode in ("edge", "reflect")))


TORCHVISION = st.one_of(
    torchvision_pads(v2.Pad, padding=AROUND),
    torchvision_pads(v2.RandomCrop, size=SIDES, padding=AROUND, pad_if_needed=st.booleans()),
    made(v2.RandomCrop, size=SIDES),
    made(v2.CenterCrop, size=SIDES),
    made(v2.RandomHorizontalFlip, p=CHANCES),
    made(v2.RandomVerticalFlip, p=CHANCES),
    made(v2.Resize, size=SIDES, interpolation=st.just(NEAREST)),
    made(v2.Resize, size=SIDES, antialias=st.booleans()),
    # By the nearest pixel, a turn of odd and even sides would take either of two.
    made(v2.RandomRotation, degrees=st.just((90, 90)), interpolation=st.just(BILINEAR), fill=st.sampled_from([None, 0.5])),
)
"""Any one of torchvision's."""

TORCHVISION_COMPOSITIONS = composed(
    TORCHVISION, torchvision_pads(v2.RandomCrop, size=SMALL, padding=st.integers(4, 9), pad_if_needed=st.just(False))
)

FLIPS_AND_PADS = st.one_of(
    made(v2.RandomHorizontalFlip, p=CHANCES), made(v2.RandomVerticalFlip, p=CHANCES), torchvision_pads(v2.Pad, padding=AROUND)
)
RAGGED_CROP = torchvision_pads(v2.RandomCrop, size=SIDES, padding=st.none() | AROUND, pad_if_needed=st.just(True))
"""What may stand before, and what gives images of every size one size."""


def kornia_pads(kind, mode, fill, **options):
    """The same of Kornia's, which takes a fill for constants alone."""
    constant = made(kind, **{mode: st.just("constant"), fill: st.sampled_from([0.25, 0.25, 0.75])}, **options)
    return st.one_of(constant, *(made(kind, **{mode: st.just(name)}, **options) for name in ("replicate", "reflect")))


KORNIA = st.one_of(
    kornia_pads(
        K.RandomCrop, "padding_mode", "fill", size=SIDES, padding=AROUND.map(lambda n: n if isinstance(n, int) else tuple(n))
    ),
    kornia_pads(K.PadTo, "pad_mode", "pad_value", size=st.tuples(st.integers(8, 20), st.integers(8, 20))),
    made(K.CenterCrop, size=SIDES),
    made(K.RandomHorizontalFlip, p=CHANCES),
    made(K.RandomVerticalFlip, p=CHANCES),
    made(K.Resize, size=SIDES, resample=st.sampled_from(["nearest", "bilinear"])),
    made(K.RandomRotation90, times=st.sampled_from([(1, 1), (0, 3)]), p=CHANCES),
)
"""Any one of Kornia's."""

KORNIA_COMPOSITIONS = composed(KORNIA, kornia_pads(K.RandomCrop, "padding_mode", "fill", size=SMALL, padding=st.integers(4, 9)))

PADS = {
    "padded by a constant": lambda: [v2.Pad((5, 2, 9, 7), fill=64)],
    "padded by the edge": lambda: [v2.Pad((5, 2, 9, 7), padding_mode="edge")],
    "reflected": lambda: [v2.Pad((5, 2, 9, 7), padding_mode="reflect")],
    "crop of a constant": lambda: [v2.RandomCrop((9, 10), padding=9, fill=64)],
    "crop of the edge": lambda: [v2.RandomCrop((9, 10), padding=9, padding_mode="edge")],
    "crop of a reflection": lambda: [v2.RandomCrop((9, 10), padding=9, padding_mode="reflect")],
    "zoomed out": lambda: [v2.RandomZoomOut(64, (1.0, 2.0)), v2.RandomCrop((9, 10), pad_if_needed=True, fill=64)],
    "padded to a size": lambda: [K.PadTo((17, 19), pad_mode="reflect"), K.RandomCrop((9, 10))],
}
OTHERS = {
    "flip": lambda side: [v2.RandomHorizontalFlip()],
    "both flips": lambda side: [v2.RandomVerticalFlip(), v2.RandomHorizontalFlip(1.0)],
    "no flip": lambda side: [v2.RandomHorizontalFlip(0.0)],
    "crop": lambda side: [v2.RandomCrop((side, side + 1))],
    "middle": lambda side: [v2.CenterCrop((side + 1, side))],
    "resize": lambda side: [v2.Resize((side, side + 2), NEAREST)],
    "smooth resize": lambda side: [v2.Resize((side + 2, side))],
    "turn": lambda side: [v2.RandomRotation((90, 90), BILINEAR, fill={torch.Tensor: 128, tv_tensors.Mask: 0})],
    "far constant": lambda side: [v2.RandomCrop(side, padding=(40, 3, 3, 3), fill=64)],
    "padded again": lambda side: [v2.Pad(3, fill=64), v2.RandomCrop(side)],
    "other constant": lambda side: [v2.Pad(3, fill=191), v2.RandomCrop(side)],
}
"""What may stand before a padding, and behind it, where images are smaller."""

SMOOTH = ("smooth", "turn")
"""Words in the names of what interpolates."""


def composition(before, pad, behind):
    """The modules of three names, of which the first and the last may be ``None``."""
    return [*(OTHERS[before](10) if before else ()), *PADS[pad](), *(OTHERS[behind](6) if behind else ())]


COMPOSITIONS = {
    ", ".join(filter(None, names)): partial(composition, *names) for names in product((None, *OTHERS), PADS, (None, *OTHERS))
}
"""Pipelines of a padding with something before it and something behind it."""

COMPOSITIONS["nothing but padding, padded again"] = lambda: [
    v2.Pad((30, 0, 0, 0), fill=64),
    v2.CenterCrop((12, 10)),
    v2.Pad(3, fill=64),
]

SOME = [*list(COMPOSITIONS)[::13], list(COMPOSITIONS)[-1]]
"""Names by which each padding meets all that may stand before it or behind it."""


def bytes_of(batch=3, channels=3, height=12, width=13):
    """Images whose pixels all differ within a channel, so that every wrong index shows."""
    pixels = torch.arange(channels * height * width).view(channels, height, width)
    return torch.stack([(pixels * 97 + 31 * sample) % 251 for sample in range(batch)]).to(torch.uint8)
