"""Inputs of the ring's tests: batches of many kinds, datasets that make them, loaders around those, and other iterables."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset


class Point(NamedTuple):
    x: torch.Tensor
    name: str


Pair = namedtuple("Pair", "images labels")


@dataclass
class Record:
    images: torch.Tensor
    meta: dict
    note: str = "none"


@dataclass(frozen=True, slots=True)
class Frozen:
    images: torch.Tensor
    labels: list


class Image(torch.Tensor):
    """A subclass, which must arrive as one."""


class NoList(tuple):
    """A container that cannot be rebuilt with other values in it."""

    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))

    def __reduce__(self):
        return NoList, tuple(self)


class Opaque:
    """A leaf that nobody looks into."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value == other.value

    __hash__ = None


def target_dicts(i, batch=5):
    """Dicts of one image each, as detection has them: any number of objects, and keys that some have and others have not."""
    from torchvision import tv_tensors  # takes a worker that is not forked from here two seconds

    made = []
    for sample in range(batch):
        n, size = (i + sample) % 4, (3 + sample, 4)
        boxes = values(i + sample, n, 4)
        made.append(
            {
                "boxes": tv_tensors.BoundingBoxes(boxes, format="XYWH", canvas_size=size),
                "masks": any_bits(sample, torch.uint8, n, *size),
                "semantic": tv_tensors.Mask(any_bits(sample, torch.bool, *size)),
                "keypoints": values(sample, n, 17, 3),
                "labels": torch.arange(n),
                "area": torch.tensor(sample / 7),
                "image_id": sample,
                "file": f"{sample}.jpg",
                "polygons": [[1.0, 2.0], torch.arange(sample)],
                "turned": values(sample, 3, n).t(),
                "learnt": values(sample, 2).requires_grad_(),
            }
        )
    del made[1]["keypoints"], made[2]["labels"]
    return made


DTYPES = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32),
]


def values(seed, *shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def any_bits(seed, dtype, *shape):
    """Every pattern of bits, so NaNs of all kinds too; of booleans those that are booleans."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def twice(i):
    tensor = values(i, 4)
    return {"first": tensor, "again": [tensor, (tensor,)]}


def two_views(i):
    base = values(i, 6, 8)
    return base, base[2:], base[:, ::2], base.t(), base[1:1], base.diagonal()


PLACED = {
    "tensor": lambda i: values(i, 3, 5),
    "tuple": lambda i: (values(i, 3, 5), torch.arange(i)),
    "list": lambda i: [values(i, 3, 5), torch.arange(3)],
    "dict": lambda i: {"b": values(i, 3, 5), "a": torch.tensor(i)},
    "nested": lambda i: {"x": [(values(i, 2), {"y": torch.arange(3)}), []], "z": ((), {}, (torch.ones(1),))},
    "named tuples": lambda i: Pair(values(i, 3), Point(torch.tensor([i]), f"number {i}")),
    "dataclass": lambda i: Record(values(i, 3), {"label": torch.tensor(i)}, note=str(i)),
    "frozen dataclass": lambda i: Frozen(values(i, 3), [torch.tensor(i), "text"]),
    "other mappings": lambda i: [
        OrderedDict(b=values(i, 3), a=1),
        defaultdict(int, x=torch.arange(i)),
        UserDict(u=torch.ones(i)),
    ],
    "no tensors among tensors": lambda i: (values(i, 2), None, i, "text", 0.5, b"bytes", ["a", "b"], Opaque(i), {1, 2}, ...),
    "arrays": lambda i: (np.arange(i), np.full((2, 2), i, np.float16), values(i, 2), np.float32(i)),
    "views": two_views,
    "channels last": lambda i: (
        values(i, 2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        values(i, 2, 3, 2, 4, 5).contiguous(memory_format=torch.channels_last_3d),
        values(i, 1, 1, 4, 5).contiguous(memory_format=torch.channels_last),
        values(i, 2, 3, 4, 5).permute(3, 1, 0, 2),
    ),
    "expanded": lambda i: (
        values(i, 3, 1).expand(3, 100),
        torch.tensor(i).expand(4, 5),
        values(i, 9).as_strided((4, 3), (2, 1)),
    ),
    "subclass beside a tensor": lambda i: (values(i, 3).as_subclass(Image), values(i, 3)),
    "requires grad beside a tensor": lambda i: (values(i, 3).requires_grad_(), values(i, 3), torch.nn.Parameter(values(i, 2))),
    "the same one twice": twice,
    "sparse beside a tensor": lambda i: (torch.eye(i + 1).to_sparse(), torch.eye(3).to_sparse_csr() * i, torch.arange(3)),
    "nothing in them": lambda i: (torch.empty(0), torch.empty(0, 3, 4), torch.empty(2, 0).t(), values(i, 2)),
    "without dimensions": lambda i: (torch.tensor(i), torch.tensor(i / 7), torch.tensor(i % 2 == 0)),
    "dtypes": lambda i: {str(dtype): any_bits(i, dtype, 3, 5) for dtype in DTYPES},
    "conjugated and negated": lambda i: (
        torch.complex(values(i, 4), values(i + 1, 4)).conj(),
        torch.complex(values(i, 4), values(i + 1, 4)).conj().imag,
        torch.complex(values(i, 4), values(i + 1, 4)).real,
    ),
    "an object that moves itself": lambda i: (pack_sequence([values(i, 4, 2), values(i, 1, 2)]), values(i, 3)),
    "many small ones": lambda i: [torch.tensor([index, i]) for index in range(40)],
    "target dicts": lambda i: (values(i, 5, 3), target_dicts(i)),
    "target dicts in tuples": lambda i: {
        "images": [values(i, 2)] * 5,
        "targets": tuple(target_dicts(i)),
        "again": target_dicts(i),
    },
    "target dicts alone": target_dicts,
    "boxes of torchvision's alone": lambda i: [{"boxes": each["boxes"]} for each in target_dicts(i, 12)],
    "target dicts that share tensors": lambda i: (target_dicts(i, 3) * 2, values(i, 2)),
    "target dicts of any dtype": lambda i: [
        {str(dtype): any_bits(i, dtype, i % 3 + 1, 5) for dtype in DTYPES} for _ in range(2)
    ],
    "one large one": lambda i: any_bits(i, torch.uint8, 300_001),
}
"""Batches some tensor of which must come through a slot."""


NOT_PLACED = {
    "no tensor": lambda i: {"text": str(i), "number": i, "array": np.arange(i)},
    "none": lambda i: None,
    "empty": lambda i: [[], (), {}],
    "subclass": lambda i: values(i, 3).as_subclass(Image),
    "requires grad": lambda i: values(i, 3).requires_grad_(),
    "sparse": lambda i: torch.eye(i + 1).to_sparse(),
}
"""Batches that have to travel as they would."""


COUNT = 12
"""Batches of most tests: with two workers the first five at most are on their way before slots can have been carved."""


class Made(Dataset):
    """Whole batches, made by a function of their number."""

    def __init__(self, make, count=COUNT):
        self.make = make
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.make(index)


def whole(samples):
    """A collate function that takes a sample for the batch, as it is."""
    return samples[0]


def made(make, count=COUNT, kind=DataLoader, **options):
    return lambda: kind(Made(make, count), collate_fn=whole, **{"num_workers": 2, **options})


def sized(sizes, **options):
    return made(lambda i: (any_bits(i, torch.uint8, sizes[i]), torch.tensor(i)), len(sizes), **options)


class Samples(Dataset):
    """Samples of several kinds, for the default collate function."""

    def __len__(self):
        return 2 * COUNT + 1

    def __getitem__(self, index):
        return {
            "image": values(index, 3, 4, 4),
            "array": np.full((2, 3), index, np.int16),
            "label": index,
            "weight": index / 3,
            "name": f"sample {index}",
            "pair": Pair(torch.tensor(index), [np.float32(index), True]),
            "nothing": torch.empty(0),
        }


def padded(samples):
    """A collate function whose batches differ in shape."""
    images = torch.stack([sample["image"] for sample in samples])
    return {"images": images[..., : 1 + samples[0]["label"] % 4], "names": [sample["name"] for sample in samples]}


def with_workers(dataset, kind=DataLoader, **options):
    return lambda: kind(dataset, **{"num_workers": 2, "batch_size": 2, **options})


def without_workers(make):
    """Function that returns the same ``DataLoader`` without workers. Other iterables are unchanged."""

    def made():
        loader = make()
        if isinstance(loader, DataLoader):
            loader.num_workers, loader.prefetch_factor = 0, None
        return loader

    return made


class Source:
    """Some other iterable."""

    def __init__(self, make, count=COUNT):
        self.make, self.count = make, count

    def __iter__(self):
        return (self.make(index) for index in range(self.count))


def generator(seed=3):
    return torch.Generator().manual_seed(seed)
