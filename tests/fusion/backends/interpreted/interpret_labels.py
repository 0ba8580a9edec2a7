"""The kernel of soft labels, for every dtype and stride of labels, against torch."""

import itertools
from unittest import mock

import torch
from support.batches.pairwise import pairwise

from gpuaug.fusion.backends.triton import mix as label_kernels
from gpuaug.fusion.ops.mix import SoftLabels

BATCH = 5
INDICES = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float64, torch.float16]
PROBABILITIES = [torch.float32, torch.float16, torch.float64]
FORMS = [
    *(("indices", dtype) for dtype in INDICES),
    ("indices, strided", torch.int64),
    *(("probabilities", dtype) for dtype in PROBABILITIES),
    ("probabilities, transposed", torch.float64),
    *(("one-hot", dtype) for dtype in (torch.int64, torch.uint8, torch.bool)),
]
CLASSES = (3, 70, 3000)
"""In half precision 2999 is 3000. 70 classes are two blocks and a part of one."""


def labels_of(form, dtype, classes):
    """Labels of 5 samples, some indices of no class."""
    indices = torch.tensor([0, classes - 1, classes, -100, 1])
    if form == "indices, strided":
        return torch.stack((indices, indices), 1)[:, 1]
    if form == "indices":
        return indices.to(dtype)
    if form == "one-hot":  # or several-hot
        return (torch.rand(BATCH, classes, generator=torch.Generator().manual_seed(0)) > 0.7).to(dtype)
    probabilities = torch.rand(BATCH, classes, generator=torch.Generator().manual_seed(0)).to(dtype)
    return probabilities.t().contiguous().t() if form == "probabilities, transposed" else probabilities


def rows_of_a_mix():
    """A skipped sample's row, one whose partner is itself, and mixes, in a table with other columns around them."""
    table = torch.full((BATCH, 13), torch.nan)
    table[:, 3:6] = torch.tensor([[0, 0, 0.0], [1, 1, 0.5], [1, 4, 0.25], [1, 2, 1.0], [1, 3, 0.7]])
    return table[:, 3:]


def failures(*, every):
    """Labels for which the kernel differs from torch."""
    cases = list(itertools.product(CLASSES, (0.0, 0.1), (False, True), FORMS))
    for classes, smoothing, mixed, form in cases if every else pairwise(cases):
        soft, labels = SoftLabels(classes, smoothing), labels_of(*form, classes)
        rows = rows_of_a_mix() if mixed else None
        with mock.patch.object(label_kernels, "MAX_BLOCK_CLASSES", 32 if classes == 70 else 1024):
            got = label_kernels.soft_labels(soft, labels, rows)
        expected = soft.convert(labels, rows)
        tolerance = 1e-3 if got.dtype == torch.float16 else 0 if rows is None and labels.ndim == 1 else 1e-6
        if got.dtype != expected.dtype or not torch.allclose(got, expected, atol=tolerance, rtol=0):
            yield f"{classes} classes, smoothing {smoothing}, mixed: {mixed}, {form}"
