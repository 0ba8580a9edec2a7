"""Rows of a feature cache on their way through a batch: what the stages of a loader have computed from one sample.

A row consists of *columns*: a column is the part of one member of the batch that belongs to one sample. Names of columns::

    latents        tensor (B, …) in the member ``latents``: one tensor (…) per row
    states.cls     tensor (B, …) in the mapping ``states``
    target[].boxes tensor of any shape in a list of B dicts, such as the boxes of an image
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.encoded import Encoded

RowId = tuple[int, int, int, int]
"""Identity of one sample: two halves of a hash of its name, size of its file in bytes, and time of the last change of the file
in nanoseconds, or a hash of the bytes if they have no file. Another size or time means that the file has changed."""

Row = Mapping[str, Tensor]
"""Name of a column → its part of the row."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Images of a batch of which some or all were read from a feature cache.

    Args:
        encoded: (B) encoded images; ``None`` if all rows were read.
        missing: (B,) bool, whether the row of a sample was not in the cache.
        ids: (B, 4) int64, the ``RowId`` of each sample; empty if all rows were read.
        names: Names of the samples, separated by zero characters, because a list would be walked with the batch; empty if all
            rows were read.
        columns: Name of a column → (B, …) tensor, or a flat tensor of all rows if the shape varies. Missing rows of the former
            have any values, of the latter none.
        shapes: Name of a column of varying shape → (B, axes) shape in each row.
    """

    encoded: Encoded | None
    missing: NDArray[np.bool_]
    ids: NDArray[np.int64]
    names: str
    columns: dict[str, Tensor]
    shapes: dict[str, NDArray[np.int64]]

    def select(self, sources: NDArray[np.int64]) -> "Rows":
        """Return rows whose row ``i`` is row ``sources[i]`` of these rows."""
        index = torch.from_numpy(sources)
        columns = {name: tensor[index] for name, tensor in self.columns.items() if name not in self.shapes}
        for name, row_shapes in self.shapes.items():
            parts = split(self.columns[name], row_shapes)
            columns[name] = torch.cat([parts[source].reshape(-1) for source in sources])
        shapes = {name: row_shapes[sources] for name, row_shapes in self.shapes.items()}
        names = self.names.split("\0")
        texts = "\0".join(names[source] for source in sources)
        return Rows(self.encoded, self.missing[sources], self.ids[sources], texts, columns, shapes)


def varies(column: str) -> bool:
    """Return whether a column may have another shape in each row."""
    return "[]" in column


def split(flat: Tensor, shapes: NDArray[np.int64]) -> list[Tensor]:
    """Return the part of each row of a column of varying shape. ``shapes``: (B, axes) shape of each part."""
    parts = flat.split(shapes.prod(1).tolist())
    return [part.reshape(shape) for part, shape in zip(parts, shapes.tolist(), strict=True)]
