"""Conversion of the members of a batch to columns, and of columns to members.

A *member* of a batch is the value of a key of a dict, an item of a tuple, or a field. A *leaf* is a value in a member that is
not a container. A *row* is what the stages up to an encoder have computed for one sample, and a feature cache records. It
consists of one tensor per *column*. A column is named by its member (``core/encoded.py``):

    latents          tensor (B, …) in the member ``latents``
    states::cls      tensor (B, …) in the dict ``states``
    target[]::boxes  tensor of varying shape per sample in a list of B target dicts
"""

from collections.abc import Collection, Mapping, MutableMapping, Set
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.encoded import RowHeaders, has_varying_shape, split
from gpuaug.core.errors import ArgumentError, ArgumentTypeError, shown
from gpuaug.core.packed_targets import unpack_targets

WHOLE = "batch"
"""Name under which a batch that is not a container is stored, as if it were a member."""


MemberLeaves = tuple[list[tuple[int, int]], list[Any]]
"""((``id``, number of changes in place) of each leaf of a member; the leaves, whose references prevent reuse of an ``id``)."""


def member_leaves(batch: Batch) -> dict[Any, MemberLeaves]:
    """Return the leaves of each member of a batch; an empty dict if the batch is not a container."""
    names = batches.member_names(batch) if batches.is_container(batch) else []
    return {name: _leaves(batches.member(batch, name)) for name in names}


def _leaves(value: Any) -> MemberLeaves:
    """Return the ``MemberLeaves`` of a member."""
    leaves = batches.leaves(value)
    # Inference tensors have no version counter.
    counts = [leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0 for leaf in leaves]
    return list(zip(map(id, leaves), counts, strict=True)), leaves


def written_members(
    before: Mapping[Any, MemberLeaves], after: Batch, image_names: Collection[Any] | None, read: Set[int]
) -> dict[str, Any]:
    """Return name → member for the members that stages have replaced or changed in place: they are stored in rows.

    Images that a stage has read are left out: later stages need only what was computed from them.

    Args:
        before: Leaves of each member before the stages.
        after: The batch after the stages.
        image_names: Names of the members that held encoded images; ``None`` if the batch was the images.
        read: ``id`` of each leaf that a stage has read. The caller must keep references to the leaves.

    Raises:
        ArgumentTypeError: If the batch has no members any more, or stages have written values other than tensors.
    """
    if image_names is None:
        return {WHOLE: unpack_targets(after)}
    if not batches.is_container(after):
        raise ArgumentTypeError(
            f"Stages up to the encoder must return a batch with members, got {shown(after)}. Put them after the encoder."
        )
    members = {}
    ids_before = {id(leaf) for _, leaves in before.values() for leaf in leaves}
    for name in batches.member_names(after):
        value = batches.member(after, name)
        identities, leaves = _leaves(value)
        is_unchanged = name in before and identities == before[name][0]
        is_read_image = name in image_names and all(id(leaf) in read for leaf in leaves)
        if not is_unchanged and not is_read_image:
            member = members[str(name)] = unpack_targets(value)
            if not all(isinstance(leaf, Tensor) or id(leaf) in ids_before for leaf in batches.leaves(member)):
                raise _refusal(str(name), member)
    return members


def columns_of(members: Mapping[str, Any], count: int) -> dict[str, list[Tensor]]:
    """Split members into columns. Return name of a column → list of its part of each of ``count`` samples.

    Raises:
        ArgumentTypeError: If a member cannot be stored.
        ArgumentError: If a name of a member or key cannot be part of the name of a column.
    """
    columns: dict[str, list[Tensor]] = {}
    for name, value in members.items():
        if _is_column(value, count):
            columns[_column_name(name)] = list(value.unbind())
        elif type(value) is dict and value and all(_is_column(item, count) for item in value.values()):
            columns |= {_column_name(name, "::", key): list(item.unbind()) for key, item in value.items()}
        elif type(value) is list and len(value) == count and all(type(item) is dict for item in value):
            for key in dict.fromkeys(key for item in value for key, entry in item.items() if isinstance(entry, Tensor)):
                parts = [item.get(key) for item in value]
                if not all(map(_is_storable, parts)) or len({(part.dtype, part.dim()) for part in parts}) > 1:
                    raise _refusal(f"{name}[…][{key!r}]", parts)
                columns[_column_name(name, "[]::", key)] = parts
        else:
            raise _refusal(name, value)
    return columns


def _column_name(name: str, separator: str = "", key: Any = "") -> str:
    """Return the name of the column of a member. ``separator``: "::" for a ``key`` of a dict, "[]::" of a list of dicts."""
    column = f"{name}{separator}{key}"
    if parts_of_column(column) != (name, separator, key) or column.startswith("row."):
        raise ArgumentError(
            "Names of members that stages up to the encoder write must be text without '::' and 'row.' in front, "
            f"got {column!r}. Write them to another member, with into=."
        )
    return column


def parts_of_column(column: str) -> tuple[str, str, str]:
    """Split the name of a column into (member, separator, key). Separator and key are empty if the member is a tensor."""
    name, separator, key = column.partition("::")
    return (name.removesuffix("[]"), "[]::", key) if separator and name.endswith("[]") else (name, separator, key)


def _is_column(value: Any, count: int) -> bool:
    """Return whether a value is a tensor (``count``, …) that can be stored."""
    return _is_storable(value) and value.dim() > 0 and len(value) == count


def _is_storable(value: Any) -> bool:
    """Return whether a value is a tensor that can be stored in a safetensors file."""
    if type(value) is not Tensor or not is_dense(value):
        return False
    return not value.dtype.is_complex or value.dtype is torch.complex64  # safetensors stores no other complex dtype


def is_dense(tensor: Tensor) -> bool:
    """Return whether the values of a tensor can be viewed as bytes: it is strided, and neither quantized nor nested."""
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)


def _refusal(name: str, value: Any) -> ArgumentTypeError:
    """Return the error for a member that cannot be stored."""
    return ArgumentTypeError(
        "Members that stages up to the encoder write must be tensors (B, …), dicts of them, or lists of target dicts whose "
        "tensors have one dtype and number of axes per key, none of complex32 or complex128, got "
        f"{shown(value)} in {name!r}. Put the stage that writes it after the encoder, or choose a tensor of an encoder's "
        "result with output=."
    )


def batch_of(live: Batch, columns: Mapping[str, Tensor], headers: RowHeaders, computed: Batch = None) -> Batch:
    """Return a batch with the rows of the cache in its members, or for some samples the results of the stages.

    Args:
        live: The batch of the data set in this epoch, without its images; ``None`` if the batch was the images.
        columns: Columns of the rows that were read (``Rows.columns``).
        headers: Description of the rows. Samples whose rows are ``missing`` are taken from ``computed``.
        computed: The batch after the stages; ``None`` if all rows were read, so that no stage has run.
    """
    # ``columns`` has names as text. A member that the stages have added is not in ``names``: its name is text, or an index.
    names = {} if live is None else {str(name): name for name in batches.member_names(live)}
    is_indexed = isinstance(live, list | tuple) and not batches.is_namedtuple(live)
    members: dict[Any, Any] = {}
    for column, values in columns.items():
        text, _, key = parts_of_column(column)
        name = names.get(text, int(text) if is_indexed else text)
        if has_varying_shape(column):
            # A list of target dicts: the row has the tensors. The other values of a dict are from the data set, in this epoch.
            if name not in members:
                live_targets = batches.member(live, name) if text in names else [{}] * len(headers.missing)
                members[name] = list(map(dict, live_targets))
            for target, part in zip(members[name], split(values, headers.shapes[column]), strict=True):
                target[key] = part
        elif key:
            members.setdefault(name, {})[key] = values
        else:
            members[name] = values
    if computed is not None:
        of_stages = {name: computed if live is None else batches.member(computed, name) for name in members}
        members = {name: _joined(value, of_stages[name], headers.missing) for name, value in members.items()}
    return members[WHOLE] if live is None else batches.replace(live, members)


def _joined(of_rows: Any, of_stages: Any, is_computed: NDArray[np.bool_]) -> Any:
    """Return a member with the parts of ``of_stages`` for computed samples, and of ``of_rows`` for the others.

    Of a list, these are target dicts with all their values; of a tensor, or a dict of tensors, elements of the first axis.
    """
    if isinstance(of_rows, dict):
        return {key: _joined(value, of_stages[key], is_computed) for key, value in of_rows.items()}
    parts = [computed if take else row for row, computed, take in zip(of_rows, of_stages, is_computed, strict=True)]
    return parts if isinstance(of_rows, list) else torch.stack(parts)


def without(batch: Batch, names: Collection[Any] | None) -> Batch:
    """Return a batch without some members: they are deleted from a mutable mapping, and ``None`` in other containers.

    Args:
        batch: The batch.
        names: Names of the members to leave out; ``None`` for the whole batch, for which ``None`` is returned.
    """
    if names is None:
        return None
    result = batches.replace(batch, dict.fromkeys(names))
    with suppress(Exception):  # raised by mappings that allow no deletion, such as ModelOutput of Transformers
        for name in names if isinstance(result, MutableMapping) else ():
            del result[name]
    return result
