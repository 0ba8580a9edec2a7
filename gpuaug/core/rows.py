"""Rows of a feature cache on their way through a batch: what the stages of a loader have computed from one sample.

A row consists of *columns*: a column is the part of one member of the batch that belongs to one sample. Names of columns::

    latents        tensor (B, …) in the member ``latents``: one tensor (…) per row
    states.cls     tensor (B, …) in the mapping ``states``
    target[].boxes tensor of any length in a list of B dicts, such as the boxes of an image
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.encoded import Encoded

RowId = tuple[int, int, int, int]
"""Identity of one sample: two halves of a hash of its name, size of its file in bytes, and time of the last change of the file
in nanoseconds, or a hash of the bytes if they have no file. Another size or time means that the file has changed."""


class Part(NamedTuple):
    """One column of one row, in the memory of a shard."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


Row = dict[str, Part]
"""Name of a column → its part of the row."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Images of a batch of which some or all were read from a feature cache.

    Args:
        encoded: (B) encoded images; a sample that was read from the cache has the file of another sample. ``None`` if all
            samples were read.
        ids: (B, 4) int64, the ``RowId`` of each sample.
        names: Name of each sample.
        missing: (B,) bool, whether the row of a sample was not in the cache.
        columns: Name of a column → (B, …) tensor, or a flat tensor of all rows if the length varies. Missing rows of the former
            have any values, of the latter none.
        shapes: Name of a column of varying length → (B, axes) shape in each row.
    """

    encoded: Encoded | None
    ids: NDArray[np.int64]
    names: Sequence[str]
    missing: Tensor
    columns: dict[str, Tensor]
    shapes: dict[str, NDArray[np.int64]]

    def select(self, sources: NDArray[np.int64]) -> "Rows":
        """Return rows whose row ``i`` is row ``sources[i]`` of these rows."""
        index = torch.from_numpy(sources)
        columns = {}
        for name, tensor in self.columns.items():
            if varies(name):
                parts = tensor.split(self.shapes[name].prod(1).tolist())
                columns[name] = torch.cat([parts[source] for source in sources.tolist()])
            else:
                columns[name] = tensor[index]
        return Rows(
            self.encoded,
            self.ids[sources],
            [self.names[source] for source in sources.tolist()],
            self.missing[index],
            columns,
            {name: shapes[sources] for name, shapes in self.shapes.items()},
        )


def varies(column: str) -> bool:
    """Return whether a column may have another length in each row."""
    return "[]" in column
