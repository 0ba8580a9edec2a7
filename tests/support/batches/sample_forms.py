"""Forms of a sample with an image and a label, which collate functions keep."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

Pair = namedtuple("Pair", "image label")


@dataclass(frozen=True)
class Record:
    label: int
    image: object


FORMS = {
    "tuple": (lambda image, label: (image, label), lambda batch: (*batch, type(batch) is list)),
    "list": (lambda image, label: [image, label], lambda batch: (*batch, type(batch) is list)),
    "dict": (lambda image, label: {"y": label, "x": image}, lambda batch: (batch["x"], batch["y"], list(batch) == ["y", "x"])),
    "mapping": (
        lambda image, label: OrderedDict(x=image, y=label),
        lambda batch: (batch["x"], batch["y"], type(batch) is OrderedDict),
    ),
    "named tuple": (Pair, lambda batch: (batch.image, batch.label, type(batch) is Pair)),
    "dataclass": (lambda image, label: Record(label, image), lambda batch: (batch.image, batch.label, type(batch) is Record)),
    "image second": (lambda image, label: (label, image), lambda batch: (batch[1], batch[0], True)),
}
"""For each form, a function that makes a sample, and one that returns a batch's image and label and whether it has the form."""
