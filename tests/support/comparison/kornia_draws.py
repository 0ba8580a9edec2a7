"""Parameters drawn by fuse and by Kornia's own generators, for every op that draws."""

import numpy as np
import torch
from support.ops.op_cases import table

import gpuaug

COUNT = 12_000

CONSTANT = {
    "batch_idx",
    "center",
    "dst",
    "forward_input_shape",
    "image_shape",
    "input_size",
    "output_size",
    "start_points",
    "values",
}
"""Parameters that are not drawn: they must be equal."""

ONE_A_BATCH = {"order", "gaussian_noise", "ksize_factor"}
"""Drawn for the batch, and so not compared from sample to sample."""

PARTNERS = {"mixup_pairs", "mix_pairs"}
"""Permutations of the batch: not shared by the samples even under ``same_on_batch``."""

DISTRIBUTION_CASES = {
    name: (case.kind, settings)
    for name, (case, settings) in table(lambda case: {**case.settings, **case.more_draws} if case.drawn else {}).items()
}
"""(class, settings) by name."""

SHAPE = (COUNT, 3, 24, 40)


def made(name, **options):
    kind, settings = DISTRIBUTION_CASES[name]
    return kind(**settings, **options)


def ours(module, shape, seed):
    augment = gpuaug.fuse(module)
    assert "left to Kornia" not in str(augment.explain(shape))  # whose draws would be its own
    return augment.draw(shape, seed=seed).as_kornia()


def kornias(module, shape, seed):
    torch.manual_seed(seed)
    return module.forward_parameters(torch.Size(shape))


def columns(params, batch):
    """Each drawn number of a sample, by a name: {name: (B,)}."""
    found = {}
    for key, value in params.items():
        if key in CONSTANT or key in ONE_A_BATCH or (key == "idx" and len(value) == 1 < batch):  # idx of a motion blur
            continue
        numbers = value.numpy()
        if key in ("src", "crop_src"):
            corners = numbers.reshape(batch, 4, 2)
            (left, top), (right, bottom) = corners[:, 0].T, corners[:, 2].T
            width, height = right - left + 1, bottom - top + 1
            found.update({"x": left, "y": top, "width": width, "height": height, "area": width * height})
            rectangle = np.stack((left, top, right, top, right, bottom, left, bottom), -1).reshape(batch, 4, 2)
            np.testing.assert_array_equal(corners, rectangle)
        elif key in ("channels", "channel_idx"):
            found[key] = numbers @ 10 ** np.arange(numbers.shape[1])
        else:
            flat = numbers.reshape(batch, -1) if key not in PARTNERS else numbers.reshape(batch, 1)
            found.update({f"{key} {index}" if flat.shape[1] > 1 else key: flat[:, index] for index in range(flat.shape[1])})
    return found
