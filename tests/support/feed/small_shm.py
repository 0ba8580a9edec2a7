"""Loops over large batches from workers, run in a process where ``/dev/shm`` is small. They print a line each."""

import gc
import sys
from collections import namedtuple
from unittest.mock import patch

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, _utils, default_collate

import gpuaug
from gpuaug.core import batch as batches

SIDE = 512  # six images of three channels are 4.7 MB
Pair = namedtuple("Pair", "image label")


class Images(Dataset):
    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 8  # the last batch is smaller

    def __getitem__(self, index):
        growing = self.kind == "growing" and index < 6
        image = torch.full(
            (3, 64 if growing else SIDE + (index if self.kind == "ragged" else 0), SIDE), index, dtype=torch.uint8
        )
        return {
            "dict": {"image": image, "deep": {"rows": image[:1], "index": index}},
            "named": Pair(image, index),
            "numpy": (image.numpy(), index),
            "records": (image, {"boxes": torch.full((index % 3, 4), index), "view": image[0]}),
        }.get(self.kind, (image, index))


def as_tuples(samples):
    return tuple(zip(*samples, strict=True))


COLLATE = {"records": as_tuples, "ragged": gpuaug.collate_ragged}
KINDS = ("tuple", "dict", "named", "numpy", "ragged", "records", "growing")


def loader(kind, workers=2, **options):
    return DataLoader(Images(kind), 6, num_workers=workers, collate_fn=COLLATE.get(kind, default_collate), **options)


def is_same(one, other):
    pairs = zip(batches.leaves(one), batches.leaves(other), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else str(a) == str(b) for a, b in pairs)


def tell(*words):
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


def check(name, streamed, wanted, passes=1):
    for _ in range(passes):
        got = list(streamed)
        same = len(got) == len(wanted) and all(map(is_same, got, wanted))
    tell(name, "right" if same else "WRONG")


def forked():
    with patch.object(_utils, "MP_STATUS_CHECK_INTERVAL", 0.5):  # seconds that it waits for each of its workers at its end
        try:
            list(loader("tuple"))
            tell("plain loader", "right")
        except RuntimeError as error:
            tell("plain loader fails:", str(error).splitlines()[-1])
        gc.collect()  # ends the iterator, which is in a cycle
    for kind in KINDS:
        wanted = list(loader(kind, workers=0))
        for feed in ("ring", "plain") if kind in ("tuple", "ragged") else ("ring",):
            check(f"{kind}, {feed},", gpuaug.StreamedLoader(loader(kind), feed=feed, device="cpu"), wanted)
    persistent = gpuaug.StreamedLoader(loader("tuple", persistent_workers=True), feed="ring", device="cpu")
    check("persistent,", persistent, list(loader("tuple", workers=0)), passes=2)


def started():
    for context in ("spawn", "forkserver"):
        wanted = list(loader("tuple", workers=0))
        check(f"{context},", gpuaug.StreamedLoader(loader("tuple", multiprocessing_context=context), device="cpu"), wanted)
    large = TensorDataset(torch.arange(32)[:, None].repeat(1, 2**16))
    sent = DataLoader(large, 8, num_workers=2, multiprocessing_context="spawn")
    check("spawn, large dataset,", gpuaug.StreamedLoader(sent, device="cpu"), list(DataLoader(large, 8)))
