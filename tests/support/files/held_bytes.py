"""Every object that may hold the bytes of a file in a sample."""

import numpy as np
import torch


def view_of(file):
    """Every second byte of twice as many."""
    return np.frombuffer(file, np.uint8).repeat(2)[::2]


HELD = {
    "bytes": bytes,
    "bytearray": bytearray,
    "memoryview": memoryview,
    "memoryview of signed bytes": lambda file: memoryview(file).cast("b"),
    "every second byte": lambda file: memoryview(view_of(file)),
    "array": lambda file: np.frombuffer(file, np.uint8),
    "strided array": view_of,
    "tensor": lambda file: torch.frombuffer(bytearray(file), dtype=torch.uint8),
    "strided tensor": lambda file: torch.from_numpy(view_of(file)),
    "row": lambda file: {"bytes": file, "path": None},
    "row of an array": lambda file: {"bytes": np.frombuffer(file, np.uint8), "path": ""},
}
