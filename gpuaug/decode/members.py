"""Functions that replace members of a batch by type, and that replace samples which cannot be decoded.

A *member* is an entry of a batch, on any level of its containers. B is the number of samples.
"""

import copy
from collections.abc import Callable, Mapping, Set, Sized
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.encoded import ClipHeaders, Encoded
from gpuaug.core.errors import DecodeError
from gpuaug.core.ragged import Ragged, Shapes
from gpuaug.core.targets import PackedTargets


def map_instances(function: Callable[[Any], Any], type_: type | tuple[type, ...], batch: Batch) -> Batch:
    """Return a copy of ``batch`` with ``function`` applied to each member of type ``type_``, which may be a container type."""
    return batches.map_members(function, lambda value: isinstance(value, type_), batch)


def with_samples_from(sources: NDArray[np.int64], batch: Batch, decoded_type: type, *, are_fields: bool) -> Batch:
    """Return a host batch whose sample ``i`` is sample ``sources[i]`` of ``batch``.

    A *column* holds one entry per sample. Tensors, arrays, ``Ragged`` and ``Encoded`` with B entries are columns, and so are
    lists of B strings. A list or tuple of B values inside the batch holds one value per sample, unless each value is a column.
    In that case it may also hold B fields of the samples, one column each, as ``default_collate`` returns for tuples. Members
    without B entries are not changed.

    Args:
        sources: (B,) index in ``batch`` from which each sample is taken.
        batch: Containers, nested to any depth.
        decoded_type: Type of members that are not changed, because their samples are replaced when they are decoded.
        are_fields: Whether ``collate_encoded`` returned the batch, so that its lists of columns hold fields. A list of columns
            from another collate function may instead hold one value per sample, such as B tensors of B labels each.

    Raises:
        DecodeError: If a member may hold one entry per sample, but has a type whose entries cannot be selected.
    """
    return _Replacement(sources, decoded_type, are_fields=are_fields).walk(batch, outermost=True)


class _Replacement:
    """Recursion of ``with_samples_from``. For the arguments see there."""

    def __init__(self, sources: NDArray[np.int64], decoded_type: type, *, are_fields: bool) -> None:
        self._sources = sources
        self._count = len(sources)
        self._decoded_type = decoded_type
        self._are_fields = are_fields

    def walk(self, value: Any, *, outermost: bool = False) -> Any:
        """Return ``value`` with the samples of all its members replaced. ``outermost``: whether it is the whole batch."""
        if isinstance(value, PackedTargets):
            value = value.unpacked()
        if isinstance(value, self._decoded_type):
            return value
        if isinstance(value, Tensor) and value.is_nested:
            self._refuse("a nested tensor")
        if isinstance(value, Tensor | np.ndarray | Ragged | Encoded):
            return self._with_samples(value) if self._is_column(value) else value
        if batches.moves_itself(value) and not isinstance(value, Mapping):
            self._refuse(f"a {type(value).__name__}")
        if not batches.is_container(value):
            if isinstance(value, Sized) and not isinstance(value, str | bytes | Set) and len(value) == self._count:
                self._refuse(f"a {type(value).__name__} of length {self._count}")
            return value
        if not outermost and self._holds_samples(value):
            return type(value)(value[source] for source in self._sources.tolist())
        members = {name: self.walk(batches.member(value, name)) for name in batches.member_names(value)}
        return batches.replace(value, members) if members else value

    def _with_samples(self, column: Any) -> Any:
        """Return a column (a tensor, array, ``Ragged`` or ``Encoded``) with its samples replaced."""
        if isinstance(column, Encoded):
            return _encoded_with_samples(self._sources, column)
        if isinstance(column, Ragged):
            return _ragged_with_samples(self._sources, column)
        if isinstance(column, np.ndarray):
            return column[self._sources]
        return column.index_select(0, torch.from_numpy(self._sources))

    def _holds_samples(self, container: Any) -> bool:
        """Return whether a container inside the batch holds one value per sample. Otherwise it holds members of the batch.

        Raises:
            DecodeError: If it may hold either of them.
        """
        if not isinstance(container, tuple | list) or batches.is_namedtuple(container) or len(container) != self._count:
            return False
        if batches.members_of_type((self._decoded_type, Encoded), container):
            return False  # B members with B images each
        if self._are_fields:
            # ``collate_encoded`` collates tuples of numbers and text into one column per field. Of other containers it makes a
            # list with one value per sample.
            return not all(self._is_text(value) or (type(value) is Tensor and value.ndim == 1) for value in container)
        if not all(map(self._is_column, container)):
            return True
        if len({_signature(value) for value in container}) == 1:
            self._refuse(f"a {type(container).__name__} of {self._count} values with {self._count} entries each")
        return False

    def _is_column(self, value: Any) -> bool:
        """Return whether ``value`` is a column, or a list of columns, on any level."""
        if isinstance(value, Tensor | np.ndarray):
            return not getattr(value, "is_nested", False) and value.ndim > 0 and len(value) == self._count
        if isinstance(value, Ragged):
            return value.shapes.samples == self._count
        if isinstance(value, Encoded):
            return len(value) == self._count
        if not isinstance(value, tuple | list) or not value:
            return False
        return self._is_text(value) or all(map(self._is_column, value))

    def _is_text(self, value: Any) -> bool:
        """Return whether ``value`` is a list or tuple of B strings."""
        is_list = isinstance(value, tuple | list) and len(value) == self._count
        return is_list and all(isinstance(entry, str | bytes) for entry in value)

    def _refuse(self, description: str) -> NoReturn:
        """Raise the error about a member that may hold one entry per sample. ``description``: member, as in "a dict"."""
        sample = int(np.flatnonzero(self._sources != np.arange(self._count))[0])
        raise DecodeError(
            f"Sample {sample} cannot be replaced, because the entry for the sample in {description} is unknown. Return "
            "tensors, arrays, lists of dicts or dicts of fields from the collate function."
        )


def _signature(column: Any) -> Any:
    """Return an object that is equal for columns that may be values of different samples: of one type, dtype and shape."""
    if isinstance(column, Tensor | np.ndarray):
        return type(column), column.dtype, tuple(column.shape)
    return type(column), isinstance(column, Ragged) or isinstance(column[0], str)


def _encoded_with_samples(sources: NDArray[np.int64], encoded: Encoded) -> Encoded:
    """Return encoded images or clips with their samples replaced. ``sources``: (B,). The result shares ``data``."""
    headers = copy.copy(encoded.headers)
    headers.table = headers.table[sources]
    headers.names = [headers.names[source] for source in sources.tolist()]
    problems = headers.problems
    headers.problems = {index: problems[source] for index, source in enumerate(sources.tolist()) if source in problems}
    if isinstance(headers, ClipHeaders):
        headers.pts = headers.pts[sources]
    return type(encoded)(encoded.data, headers)


def _ragged_with_samples(sources: NDArray[np.int64], images: Ragged) -> Ragged:
    """Return a ``Ragged`` with its samples (images or clips) replaced. ``sources``: (B,) int64.

    The images are whole: only a ``DecodeStage`` makes windows, and its images are not in the host batch yet.
    """
    shapes = images.shapes
    frames = shapes.frames or 1
    image_indices = (sources[:, None] * frames + np.arange(frames)).ravel()
    ends = shapes.sizes.prod(1).cumsum() * shapes.channels
    lengths = np.diff(ends, prepend=0)
    data = torch.cat([images.data[ends[image] - lengths[image] : ends[image]] for image in image_indices])
    sizes = shapes.sizes[image_indices]
    starts = lengths[image_indices].cumsum() - lengths[image_indices]
    places = torch.from_numpy(np.column_stack([starts, sizes]))
    return Ragged(data, places, Shapes(sizes, shapes.channels, shapes.layout, frames=shapes.frames))
