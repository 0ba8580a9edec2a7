"""Filter kernels on values that photographs do not have, against torch."""

from unittest import mock

import kornia.augmentation as K
import numpy as np
import torch
from support.comparison.values import difference
from torchvision.transforms import v2

from gpuaug.fusion.backends.triton import backend
from gpuaug.fusion.backends.triton.filters import blur
from gpuaug.fusion.backends.triton.launch import FilterLaunch
from gpuaug.fusion.lower.tree import lowered as lowered_by
from gpuaug.fusion.ops import filters
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.ops.filters import EqualizeOrContrast
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.ops.torchvision import filters as torchvision_filters
from gpuaug.fusion.ops.torchvision.base import TorchvisionOp
from gpuaug.fusion.program.intermediates import UINT16_UNIT
from gpuaug.fusion.program.plan import OpPass

OF_BYTES = (v2.RandomAutocontrast(0.5), v2.RandomEqualize(1.0), v2.RandomAutocontrast(1.0))
"""Transforms before a conversion, whose floats stand for bytes."""

FILTERS = {
    "wide": K.RandomGaussianBlur((13, 11), (0.5, 5.0), p=1.0),
    "narrow": K.RandomGaussianBlur((3, 5), (0.5, 2.0), p=0.5),
    "one pixel": K.RandomGaussianBlur((1, 11), (0.5, 2.0), border_type="constant", p=1.0),
    "all in the middle": K.RandomGaussianBlur(3, (1e-4, 1e-3), p=1.0),
    "box": K.RandomBoxBlur((5, 3), border_type="constant", p=0.5),
    "median": K.RandomMedianBlur(p=0.5),
    "median, wide": K.RandomMedianBlur(5, p=1.0),
    "motion": K.RandomMotionBlur((3, 7), 180.0, 1.0, p=0.5),
    "motion, reflected": K.RandomMotionBlur(9, 180.0, 0.5, border_type="reflect", resample="bilinear", p=1.0),
    "motion, replicated": K.RandomMotionBlur(41, 180.0, 0.5, border_type="replicate", p=1.0),
    "motion, circular": K.RandomMotionBlur(33, 180.0, 0.5, border_type="circular", p=0.5),
    "sharpness": K.RandomSharpness((0.0, 4.0), p=0.5),
    "equalize": K.RandomEqualize(p=0.5),
    "CLAHE": K.RandomClahe((30.0, 90.0), (4, 5), p=0.5),
    "CLAHE, one tile": K.RandomClahe((0.1, 0.2), (1, 1), p=1.0),
    "auto contrast": K.RandomAutoContrast(p=0.5),
    "auto contrast, unclipped": K.RandomAutoContrast(clip_output=False, p=1.0),
    "equalize, torchvision's": v2.RandomEqualize(0.5),
    "autocontrast, torchvision's": v2.RandomAutocontrast(0.5),
    "equalize or auto contrast": (K.RandomEqualize(p=1.0), K.RandomAutoContrast(p=1.0)),
    "equalize or autocontrast": (v2.RandomEqualize(1.0), v2.RandomAutocontrast(1.0)),
    "autocontrast of bytes": OF_BYTES[0],
    "equalize or autocontrast of bytes": OF_BYTES[1:],
}
LOWERED = lowered_by(filters, torchvision_filters)


STRIPS = {
    "reflected": (K.RandomGaussianBlur((23, 21), (0.5, 2.0), p=0.5), (40, 64), UINT16_UNIT),
    "reflected, odd": (K.RandomGaussianBlur((5, 33), (0.1, 9.0), p=0.5), (18, 37), UINT16_UNIT),
    "black border": (K.RandomGaussianBlur((33, 7), (0.5, 2.0), border_type="constant", p=1.0), (40, 48), UINT16_UNIT),
    "black border, bytes": (K.RandomGaussianBlur((7, 23), (0.5, 2.0), border_type="constant", p=1.0), (33, 50), torch.uint8),
    "replicated, narrow": (K.RandomGaussianBlur((9, 23), (0.5, 2.0), border_type="replicate", p=0.5), (20, 9), torch.uint8),
    "circular": (K.RandomGaussianBlur((31, 3), (3.0, 9.0), border_type="circular", p=1.0), (35, 34), torch.uint8),
    "box": (K.RandomBoxBlur((7, 33), p=0.5), (33, 34), torch.uint8),
}
"""Blurs by products of matrices, which are made for bfloat16: here for float16, since the interpreter only cuts that off."""


def batches():
    """Images outside [0, 1] with nan in the middle and in a corner; bytes; 16 bits a value; one channel with nan."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2, 3, 18, 24, generator=generator) * 2 - 0.5
    holes, grey = images.clone(), images[:, :1].clone()
    holes[0, 1, 9, 15] = holes[1, 2, 0, 0] = grey[0, 0, 9, 15] = grey[1, 0, 0, 0] = torch.nan
    return {
        "holes": (holes, torch.float32, torch.contiguous_format),
        "bytes": ((images.clamp(0, 1) * 255).to(torch.uint8), torch.float16, torch.channels_last),
        "kept": ((images.clamp(0, 1) * 65535).to(torch.int32).to(UINT16_UNIT), torch.float16, torch.channels_last),
        "grey": (grey, torch.float32, torch.contiguous_format),
        "flat": (nearly_flat(generator), torch.float32, torch.contiguous_format),
    }


def nearly_flat(generator):
    """Images of one value but for a rounding error, of two bytes but for one, and of a value without one."""
    errors = torch.randint(-2, 3, (2, 3, 18, 24), generator=generator) * 2.0**-22
    errors[:, 2] = 0
    two = torch.randint(100, 102, (2, 1, 18, 24), generator=generator) / 255
    return torch.cat((torch.full((2, 1, 18, 24), 128 / 255), two, torch.ones(2, 1, 18, 24)), 1) + errors


def lowered(module, images):
    """The op of a module; or of two, of which each sample picks one."""
    if isinstance(module, tuple):
        op = EqualizeOrContrast("filter", tuple(lowered(each, images) for each in module))
        op.p = 0.5
        return op
    kind = LOWERED[type(module)]
    of_bytes = images.dtype == torch.uint8 or any(module is each for each in OF_BYTES)
    units = (torch.uint8 if of_bytes else torch.float32,) if issubclass(kind, TorchvisionOp) else ()
    return kind("filter", module, *units)


def fault(module, images, dtype, memory_format, *, way=False, launches=None):
    """How the kernels' result differs from torch's, or an empty string. The first sample is skipped if the module may skip.

    ``way``: in a pass that takes each from the first of two buffers to the first, and could have left it.
    """
    op, size = lowered(module, images), Size(*images.shape)
    drawn = op.draw(Sampler((1,), size.batch), size)
    drawn["apply_mask"] = np.arange(size.batch) >= (op.is_random and not isinstance(module, tuple))
    if isinstance(module, tuple):
        drawn["parts"] = [(each, {"apply_mask": np.arange(size.batch) == index}) for index, each in enumerate(op.picks)]
    # Columns before the filter's own belong to other passes.
    table = np.full((size.batch, 2 + op.row_width(3) + way), np.nan, np.float32)
    op.write_rows(drawn, size, table[:, 2 : 2 + op.row_width(3)])
    table[:, 2 + op.row_width(3) :] = 1
    rows = torch.from_numpy(table)
    floats = images.float() / {torch.uint8: 255, UINT16_UNIT: 65535}.get(images.dtype, 1)
    expected = torch.where(rows[:, 2, None, None, None] != 0, op.apply(floats, rows[:, 2:]), floats).to(dtype)
    got = torch.empty(images.shape, dtype=dtype).to(memory_format=memory_format)
    step = OpPass(op, (), size, size, (), first_column=2, route_column=op.row_width(3) if way else -1)
    launch = backend.OP_KERNELS[op.kernel](step, images, step.columns_of(rows), got)
    launch((images, got, step.columns_of(rows)))
    if (isinstance(launch, FilterLaunch) and launch.first is not None) != ((launches or op.launches) == 2):
        return f"{launch}"
    skipped = slice(int(not drawn["apply_mask"][0] and dtype != torch.float16))
    text = difference(got[skipped], expected[skipped], equal_nan=True)
    return text or difference(got, expected, atol=1e-3 if dtype == torch.float16 else 2e-6, equal_nan=True)


def fault_in_strips(name, channels, memory_format):
    """``fault`` of a blur in strips."""
    module, shape, dtype = STRIPS[name]
    images = torch.rand(2, channels, *shape, generator=torch.Generator().manual_seed(1))
    images = (images * (255 if dtype == torch.uint8 else 65535)).to(torch.int32).to(dtype)
    with mock.patch.object(blur, "blurs_in_strips", return_value=True):
        return fault(module, images, torch.float16, memory_format, way="odd" in name, launches=1)


def failures(*, every):
    """Names of the filters whose kernels differ from torch, and on which images."""
    few = {"narrow": ("bytes", "kept", "grey"), "one pixel": ("bytes", "kept", "grey")}
    few["median"] = "holes", "bytes", "kept", "grey"
    few["motion"] = "holes", "bytes", "kept", "grey"
    few["sharpness"] = "holes", "bytes", "kept", "grey"
    few |= dict.fromkeys(
        (name for name in FILTERS if name.startswith(("equalize", "CLAHE", "auto"))), ("holes", "bytes", "grey", "flat")
    )
    forms = [(3, torch.channels_last), (2, torch.contiguous_format)]
    for number, name in enumerate(STRIPS):
        for channels, memory_format in forms if every else forms[number % 2 :][:1]:
            if text := fault_in_strips(name, channels, memory_format):
                yield f"blur in strips, {name}, {channels} channels: {text}"
    for name, module in FILTERS.items():
        for number, (batch, (images, dtype, memory_format)) in enumerate(batches().items()):
            if every or batch in few.get(name, ("grey",)):
                # Tables are made of parts there.
                ways = (False, True) if name.startswith(("equalize", "auto")) else (False,)
                for way in ways if every else ways[number % len(ways) :][:1]:
                    if text := fault(module, images, dtype, memory_format, way=way):
                        yield f"{name}, {batch}{', with a way' if way else ''}: {text}"
