"""Inputs of a row: the values of members of a sample that stages have then overwritten, such as boxes.

A *row* is the results of the stages up to an encoder for one sample, which a feature cache records. It is valid only for the
image and the inputs from which the stages have computed it: if the boxes of the sample change, its row must not be read. A
*member* of a sample is the value of a key of a dict, an item of a tuple, or a field. An *entry* is a member that holds no
image, or an item of such a member if it is a dict. Its name is ``member`` or ``member::key``.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from operator import xor
from typing import Any

import numpy as np
from torch import Tensor

from gpuaug.cache.members import is_dense, parts_of_column
from gpuaug.cache.shards import as_bytes
from gpuaug.core import batch as batches
from gpuaug.core.encoded import Undecoded


def digest_of(value: Any, size: int) -> bytes:
    """Return a hash of ``size`` bytes of a value, the same in all processes. Arrays are hashed by all their values."""
    digest = hashlib.blake2b(digest_size=size)
    for path, leaf in batches.named_leaves(value):
        content: Any = None
        if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            content = leaf.tobytes()
        elif isinstance(leaf, Tensor) and is_dense(leaf):
            content = as_bytes(leaf.detach().as_subclass(Tensor).cpu())
        text = repr(leaf) if content is None else f"{leaf.dtype} {leaf.shape}"
        digest.update(f"{path} {text}\n".encode(errors="surrogateescape"))
        digest.update(content or b"")
    return digest.digest()


def input_hashes(sample: Any, names: Collection[str] | None = None) -> dict[str, int]:
    """Return name → hash of the entries of a sample. Empty if the sample has no members.

    Args:
        sample: Sample of a data set: a dict, tuple, or other value.
        names: Names of the entries to hash; ``None`` for all entries.
    """
    hashes: dict[str, int] = {}
    if names == () or not batches.is_container(sample):
        return hashes
    for member_name in batches.member_names(sample):
        member = batches.member(sample, member_name)
        for key, value in member.items() if type(member) is dict else [(None, member)]:
            name = str(member_name) if key is None else f"{member_name}::{key}"
            is_needed = names is None or name in names
            if is_needed and not any(isinstance(leaf, Undecoded) for leaf in batches.leaves(value)):
                hashes[name] = int.from_bytes(digest_of((name, value), 8), "little", signed=True)
    return hashes


def combined(hashes: Iterable[int]) -> int:
    """Return one hash of the hashes of several entries. It does not depend on their order."""
    return reduce(xor, hashes, 0)


def inputs_of_rows(columns: Iterable[str], hashes: Sequence[Mapping[str, int]]) -> tuple[tuple[str, ...], list[int]]:
    """Return (names of the inputs of rows; per row, combined hash of its inputs).

    Args:
        columns: Names of the columns of the rows, such as ``target[]::boxes`` (``core/encoded.py``): what stages have written.
        hashes: ``input_hashes`` of the sample of each row.
    """
    written = {(member, key) for member, _, key in map(parts_of_column, columns)}
    names = []
    for name in sorted(set().union(*hashes)):
        member, _, key = parts_of_column(name)
        # An entry was overwritten if a column has its member and key; or only its member, if the stages have replaced a dict by
        # a tensor, or a tensor by a dict.
        if any(member == other and (not key or not other_key or key == other_key) for other, other_key in written):
            names.append(name)
    return tuple(names), [combined(values[name] for name in names if name in values) for values in hashes]
