"""Ops that run one of several pointwise ops, or one of several affine warps, per sample.

*Policies*, such as RandAugment, pick ops at random. The ops in this file run the picked op of each sample, so that one kernel
serves all picks. Their draws hold ``"parts"``: a list of (op, draws of the op), whose *apply masks*, (B,) bool, are True for
the samples that picked the op. A *sample* is an image or a clip. A *row* holds the parameters of one sample for the kernel,
beginning with the apply mask: if it is 0, the sample is unchanged.
"""

from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from gpuaug.fusion.ops.base import LARGEST_CODE, Array, OpDraws, PointOp, Size, select_samples
from gpuaug.fusion.ops.geometry import WarpOp
from gpuaug.fusion.ops.warp import MatrixWarp, identities
from gpuaug.fusion.pixels import UNCHANGED


class OneOf(PointOp):
    """One of several pointwise ops, picked per sample or per batch. One compiled kernel runs any of them.

    Columns of a row: the apply mask; the code of the picked op (``PointOp.code``); and the row of the picked op. ``flags`` has
    bit n if the op with code n can be picked.

    Args:
        name: Name of the module that picks.
        ops: Ops that can be picked, for all of which ``accepts`` is true.
    """

    code = LARGEST_CODE

    def __init__(self, name: str, ops: Sequence[PointOp]) -> None:
        super().__init__(name, nn.Identity())
        self._op_by_code = {op.code: op for op in ops}
        self.flags = sum(1 << code for code in self._op_by_code)
        self.rgb_only = any(op.rgb_only for op in ops)  # type: ignore[misc]
        self.keeps_unit_range = all(op.keeps_unit_range for op in ops)
        self.to_bytes = ops[0].to_bytes

    @staticmethod
    def accepts(op: Any) -> TypeGuard[PointOp]:
        """True if a ``OneOf`` can run ``op``.

        ``op`` must be a pointwise op without flags that depends neither on coordinates nor on the mean grey of the image, and
        whose results need no conversion to bytes.
        """
        is_simple = isinstance(op, PointOp) and not (op.positional or op.flags or op.needs_mean)
        return is_simple and op.to_bytes in (None, UNCHANGED)

    def row_width(self, channels: int) -> int:
        """Number of columns of a row: the apply mask, the code, and the columns of the op with the longest row."""
        return 2 + max(op.row_width(channels) for op in self._op_by_code.values())

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the code and the row of the op that each sample picked; zeros for samples that picked no op."""
        out[:, 1:] = 0
        for op, op_draws in draws["parts"]:
            samples = np.flatnonzero(op_draws["apply_mask"])
            rows = np.zeros((len(samples), op.row_width(size.channels)), dtype=np.float32)
            op.write_rows(select_samples(op_draws, samples), size.select(samples), rows)
            out[samples, 1] = op.code
            out[samples, 2 : 2 + rows.shape[1]] = rows

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Return for each sample the result of the op that it picked."""
        output = images
        for code, op in self._op_by_code.items():
            mask = rows[:, 1] == code
            # On a GPU all ops run, because ``mask.any()`` would make the host wait for the device.
            if mask.is_cuda or bool(mask.any()):
                # ``op`` is applied to the whole batch. For samples that picked another op, it gets rows of zeros, because the
                # rows of the other op may be out of range for ``op``, for example as an index of a channel.
                op_rows = rows[:, 2:].masked_fill(~mask[:, None], 0)
                output = torch.where(mask[:, None, None, None], op.apply(images, op_rows), output)
        return output

    def describe(self) -> str:
        """Short description for ``explain()``."""
        return "one of " + ", ".join(op.describe() for op in self._op_by_code.values())


class AnyAffine(MatrixWarp):
    """One of several affine warps, picked per sample. They run as one warp, with the matrix of the picked warp.

    Args:
        name: Name of the module that picks.
        warp: One of the warps, with the interpolation, the padding mode and the fill of all warps.
    """

    description = "one of several affine warps"

    def __init__(self, name: str, warp: WarpOp) -> None:
        super().__init__(name, nn.Identity())
        self.edge, self.fill, self.nearest = warp.edge, warp.fill, warp.nearest
        self.to_bytes = warp.to_bytes

    def _read(self, module: Any) -> None:
        """Do nothing: the constructor copies the settings of ``warp``."""

    @staticmethod
    def accepts(op: Any) -> TypeGuard[WarpOp]:
        """True if an ``AnyAffine`` can run ``op``: if it is an affine warp."""
        return isinstance(op, WarpOp) and op.matrix_type == "affine"

    def matrix(self, draws: OpDraws, size: Size) -> Array:
        """Forward matrix of the warp that each sample picked; the identity for samples that picked none."""
        matrices = identities(size.batch)
        for op, op_draws in draws["parts"]:
            samples = np.flatnonzero(op_draws["apply_mask"])
            matrices[samples] = op.matrix(select_samples(op_draws, samples), size.select(samples))
        return matrices
