"""Batches of any nesting, for tests of what walks over them."""

from collections import OrderedDict, UserDict

import numpy as np
import torch
from hypothesis import strategies as st
from support.feed.ring_inputs import DTYPES, Frozen, Image, Opaque, Pair, Record, any_bits
from torch.nn.utils.rnn import pack_sequence

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def tensors(draw):
    """A tensor of any dtype, shape and strides, and of any bits."""
    tensor = any_bits(draw(st.integers(0, 99)), draw(st.sampled_from(DTYPES)), *draw(SHAPES))
    dims = draw(st.permutations(range(tensor.dim())))
    how = draw(st.sampled_from(["as it is", "permuted", "sliced", "expanded", "offset"]))
    if how == "permuted":
        return tensor.permute(dims)
    if how == "sliced" and tensor.dim():
        return tensor[tuple(slice(draw(st.integers(0, 1)), None, draw(st.integers(1, 2))) for _ in range(tensor.dim()))]
    if how == "expanded":
        return tensor.unsqueeze(0).expand(3, *tensor.shape)
    if how == "offset" and tensor.dim():
        return tensor[1:].permute(dims)
    return tensor


LEAVES = st.one_of(tensors(), st.text(max_size=3), st.none(), st.integers(), st.just(...))


def nested(leaves):
    """Any nesting of containers around leaves."""
    return st.recursive(leaves, containers, max_leaves=8)


def containers(inside):
    return st.one_of(
        st.lists(inside, max_size=4),
        st.lists(inside, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=2), inside, max_size=3),
        st.tuples(inside, inside).map(lambda pair: Pair(*pair)),
        st.tuples(inside, inside).map(lambda pair: Record(pair[0], {"inside": pair[1]})),
        inside.map(lambda same: (same, [same])),
    )


NESTED = nested(LEAVES)

ODD = st.sampled_from(
    [
        *(0.5, b"bytes", 1 + 2j, True, range(3), frozenset([1]), torch.float16, torch.Size([2]), Opaque(1), Ellipsis, torch),
        *([], (), {}, "", torch.zeros(()), torch.zeros(2, 0, 3), torch.zeros(3).to_sparse(), np.zeros((2, 0)), np.float32(2)),
        *(np.array(["text"]), np.zeros(2, dtype=[("field", int)]), {None: 1, ("a", 2): torch.ones(2)}, torch.nn.Linear),
        *(torch.ones(2).as_subclass(Image), torch.ones(1).expand(2, 4)),
        *(
            Frozen(torch.arange(2), [1]),
            UserDict(a=torch.ones(1)),
            OrderedDict(b=(torch.ones(1),)),
            pack_sequence([torch.ones(2)]),
        ),
    ]
)
"""Leaves and containers that are in few batches."""

ANY_BATCH = nested(LEAVES | ODD)
