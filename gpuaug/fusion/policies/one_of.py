"""Ops that run one of several pointwise ops, or one of several affine warps, per sample. Policies are lowered to them."""

from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from gpuaug.fusion.ops.base import MOST_CODES, Array, OpDraws, PointOp, Size, cut
from gpuaug.fusion.ops.geometry import WarpOp
from gpuaug.fusion.ops.warp import MatrixWarp


class OneOf(PointOp):
    """One of several pointwise ops, picked per sample or per batch. One compiled kernel serves all picks.

    A row holds the apply mask, the code of the picked op, and the row of the picked op.

    Args:
        name: Name of the module that picks.
        ops: Ops that can be picked. ``takes`` is True for all of them.
    """

    code = MOST_CODES
    width = 0

    def __init__(self, name: str, ops: Sequence[PointOp]) -> None:
        super().__init__(name, ops[0].module)
        self._op_by_code = {op.code: op for op in ops}
        self._ops = tuple(ops)
        self.flags = sum(1 << code for code in self._op_by_code)
        self.rgb_only = any(op.rgb_only for op in ops)  # type: ignore[misc]
        self.keeps_unit_range = all(op.keeps_unit_range for op in ops)

    def _read(self, module: Any) -> None:
        """Do nothing: settings are read by the ops."""

    @staticmethod
    def takes(op: Any) -> TypeGuard[PointOp]:
        """True for a pointwise op whose result depends on the pixel and the row only, not on coordinates, flags or the mean."""
        return isinstance(op, PointOp) and not (op.positional or op.flags or op.needs_mean)

    @property
    def is_random(self) -> bool:
        """True, because a sample may have picked no op."""
        return True

    def channels_taken(self, channels: int) -> tuple[str, str] | None:
        """Return ``None``: the policy checks its ops."""
        return None

    def unsupported_size(self, size: Size) -> str | None:
        """Return ``None``: the policy checks its ops."""
        return None

    def row_width(self, channels: int) -> int:
        """Length of a row: the apply mask, the code, and the longest row of an op."""
        return 2 + max(op.row_width(channels) for op in self._ops)

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """Write the code and row of the picked op per sample, or zeros if no op was picked.

        ``drawn["parts"]`` holds tuples (op, its draws, mask of its samples or ``None`` for all samples).
        """
        out[:, 1:] = 0
        for op, op_drawn, where in drawn["parts"]:
            width = op.row_width(size.channels)
            if where is None:
                out[:, 0] = op_drawn["apply_mask"]
                out[:, 1] = op.code
                op.rows(op_drawn, size, out[:, 2 : 2 + width])
                continue
            samples = np.flatnonzero(where)
            rows = np.zeros((len(samples), width), dtype=np.float32)
            op.rows(cut(op_drawn, samples), size.taking(samples), rows)
            out[samples, 0] = rows[:, 0]
            out[samples, 1] = op.code
            out[samples, 2 : 2 + width] = rows

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Apply every op to the samples that picked it."""
        output = images
        for code, op in self._op_by_code.items():
            picked = rows[:, 1] == code
            # On a GPU ``picked.any()`` would synchronise with the host, so all ops run.
            if picked.is_cuda or bool(picked.any()):
                # Zero the rows of samples that picked another op: apply runs on the whole batch, and an unrelated value may be
                # out of range, for example as a channel index in gather.
                op_rows = rows[:, 2:].masked_fill(~picked[:, None], 0)
                output = torch.where(picked[:, None, None, None], op.apply(images, op_rows), output)
        return output

    def describe(self) -> str:
        """Short description for ``explain()``."""
        return "one of " + ", ".join(op.describe() for op in self._op_by_code.values())


class AnyAffine(MatrixWarp):
    """One of several affine warps, picked per sample and run as one warp.

    Args:
        name: Name of the module that picks.
        warp: Any of the warps. All have the same interpolation, edge and fill.
    """

    words = "one of several affine warps"

    def __init__(self, name: str, warp: WarpOp) -> None:
        # Skip MatrixWarp.__init__, which reads the settings of a Kornia module.
        WarpOp.__init__(self, name, nn.Identity())
        self.edge, self.fill, self.nearest = warp.edge, warp.fill, warp.nearest
        self.p = 0.5  # below 1, because a sample may have picked no warp

    @staticmethod
    def takes(op: Any) -> TypeGuard[WarpOp]:
        """True for an affine warp."""
        return isinstance(op, WarpOp) and op.kind == "affine"

    def unsupported_size(self, size: Size) -> str | None:
        """Return ``None``: the policy checks its ops."""
        return None

    def _moved_samples(self, drawn: OpDraws, size: Size) -> tuple[Array | None, Array]:
        # drawn["parts"] holds tuples (op, its draws, mask of its samples).
        moved = [np.empty(0, np.int64)]
        matrices = [np.empty((0, 3, 3))]
        for op, op_drawn, where in drawn["parts"]:
            samples = np.flatnonzero(where)
            moved.append(samples)
            matrices.append(op.matrix(cut(op_drawn, samples), size.taking(samples)))
        return np.concatenate(moved), np.concatenate(matrices)
