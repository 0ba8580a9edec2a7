"""The ops that policies are compiled to: one of several pointwise ops, or one of several affine warps, per sample."""

from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from gpuaug.fusion.ops.base import MOST_CODES, Array, OpDraws, PointOp, Size, cut
from gpuaug.fusion.ops.geometry import WarpOp
from gpuaug.fusion.ops.warp import MatrixWarp


class OneOf(PointOp):
    """One of several pointwise ops, picked for each sample or for the batch, compiled once for all picks.

    A row holds the apply mask, the code of the op that was picked, and that op's own row.

    Args:
        name: Name of the module that picks.
        ops: The ops that can be picked. ``takes`` is True for each.
    """

    code = MOST_CODES
    width = 0

    def __init__(self, name: str, ops: Sequence[PointOp]) -> None:
        super().__init__(name, ops[0].module)
        self._kinds = {op.code: op for op in ops}
        self._ops = tuple(ops)
        self.flags = sum(1 << code for code in self._kinds)
        self.rgb_only = any(op.rgb_only for op in ops)  # type: ignore[misc]
        self.keeps_unit_range = all(op.keeps_unit_range for op in ops)

    def _read(self, module: Any) -> None:
        """Nothing: the settings are those of the ops."""

    @staticmethod
    def takes(op: Any) -> TypeGuard[PointOp]:
        """True for a pointwise op that needs the pixel and its row only: no coordinates, flags or mean."""
        return isinstance(op, PointOp) and not (op.positional or op.flags or op.needs_mean)

    @property
    def is_random(self) -> bool:
        """True: a sample may have picked no op."""
        return True

    def unsupported_size(self, size: Size) -> str | None:
        """``None``: the module that picks checks its ops."""
        return None

    def row_width(self, channels: int) -> int:
        """The apply mask, the code, and the longest row of an op."""
        return 2 + max(op.row_width(channels) for op in self._ops)

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """Code and row of each sample's op, zeros without one, from ``"parts"``: (op, its draws, samples; ``None`` for all)."""
        out[:, 1:] = 0
        for op, own, where in drawn["parts"]:
            width = op.row_width(size.channels)
            if where is None:
                out[:, 0] = own["apply_mask"]
                out[:, 1] = op.code
                op.rows(own, size, out[:, 2 : 2 + width])
                continue
            samples = np.flatnonzero(where)
            rows = np.zeros((len(samples), width), dtype=np.float32)
            op.rows(cut(own, samples), size.taking(samples), rows)
            out[samples, 0] = rows[:, 0]
            out[samples, 1] = op.code
            out[samples, 2 : 2 + width] = rows

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Each op on the samples that picked it."""
        made = images
        for code, op in self._kinds.items():
            picked = rows[:, 1] == code
            # On a GPU the host would have to wait for the answer, so all ops run.
            if picked.is_cuda or bool(picked.any()):
                # Zero the rows of samples that picked another op: apply runs on the whole batch, and an unrelated value may be
                # out of range, for example as a channel index in gather.
                own = rows[:, 2:].masked_fill(~picked[:, None], 0)
                made = torch.where(picked[:, None, None, None], op.apply(images, own), made)
        return made

    def describe(self) -> str:
        """In a few words."""
        return "one of " + ", ".join(op.describe() for op in self._kinds.values())


class AnyAffine(MatrixWarp):
    """One of several affine warps, picked for each sample, as one warp.

    Args:
        name: Name of the module that picks.
        like: Any of the warps. All have the same interpolation, edge and fill.
    """

    words = "one of several affine warps"

    def __init__(self, name: str, like: WarpOp) -> None:
        # Not that of MatrixWarp, which reads the settings of a Kornia module.
        WarpOp.__init__(self, name, nn.Identity())
        self.edge, self.fill, self.nearest = like.edge, like.fill, like.nearest
        self.p = 0.5  # a sample may have picked none

    @staticmethod
    def takes(op: Any) -> TypeGuard[WarpOp]:
        """True for an affine warp."""
        return isinstance(op, WarpOp) and op.kind == "affine"

    def unsupported_size(self, size: Size) -> str | None:
        """``None``: the module that picks checks its ops."""
        return None

    def _moved(self, drawn: OpDraws, size: Size) -> tuple[Array | None, Array]:
        # Each part is an op, its draws, and the mask of its samples.
        moved = [np.empty(0, np.int64)]
        matrices = [np.empty((0, 3, 3))]
        for op, own, where in drawn["parts"]:
            samples = np.flatnonzero(where)
            moved.append(samples)
            matrices.append(op.matrix(cut(own, samples), size.taking(samples)))
        return np.concatenate(moved), np.concatenate(matrices)
