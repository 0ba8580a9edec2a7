"""What ``SECURITY.md`` promises of files, logs and errors. The ring's memory: ``tests/feed/ring/test_other_users.py``."""

import logging
import warnings

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from support.files.encoded import encoded
from support.process import processes

from gpuaug import (
    DecodeStage,
    GpuAugError,
    StreamedLoader,
    TransformStage,
    collate_encoded,
    collate_ragged,
    fuse,
    read_encoded,
    sanitize,
)

WITHOUT_FILES = """
import os, sys
import kornia.augmentation as K
import torch
from support.files.encoded import encoded
from torch.utils.data import DataLoader
import gpuaug

sys.dont_write_bytecode = True
MADE = ("os.mkdir", "os.rename", "os.link", "os.symlink", "tempfile.mkstemp", "tempfile.mkdtemp")

def refuse(event, arguments):
    "In this process and in its workers."
    writes = event == "open" and isinstance(arguments[0], str | bytes) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    of_python = "pymp-" in str(arguments[:1])  # where the sockets are through which workers send tensors
    if not of_python and (event in MADE or (writes and arguments[0] != "/dev/null")):
        raise AssertionError(f"{event} of {arguments}")

sys.addaudithook(refuse)
files = [(encoded(20 + index, 30), index) for index in range(8)]
crop = gpuaug.fuse(K.AugmentationSequential(K.RandomResizedCrop((8, 8)), K.ColorJitter(0.1, 0.1, 0.1, 0.1)), ragged=True)
for workers, feed in ((0, "ring"), (1, "plain"), (1, "ring")):
    wrapped = DataLoader(files, 2, num_workers=workers, collate_fn=gpuaug.collate_encoded)
    stages = [gpuaug.DecodeStage(), crop, gpuaug.FeatureStage(torch.nn.Flatten())]
    with gpuaug.StreamedLoader(wrapped, stages, device="cpu", feed=feed) as loader:
        for _ in range(2):
            assert len(list(loader)) == 4
        loader.load_state_dict(loader.state_dict())
        if not workers:
            gpuaug.profile(loader, lambda batch: None, batches=8, rounds=1, show=False)
print("done")
"""


def test_no_file_is_made():
    done = processes.run_script(WITHOUT_FILES)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


LABEL, NUMBER, PIXEL = "a label of the user's", 987654321, 173
IMAGE = np.full((8, 8, 3), PIXEL, np.uint8)
IMAGES = torch.full((2, 3, 8, 8), float(PIXEL))
FLIP = fuse(K.RandomHorizontalFlip())
MIX = fuse(K.RandomMixUpV2(p=1.0, data_keys=["input", "class"]), num_classes=5)


def streamed(batch, *stages):
    return lambda: list(StreamedLoader([batch], list(stages), device="cpu"))


def with_targets(**target):
    return lambda: FLIP(IMAGES, [target, target], data_keys=["input", "targets"])


REFUSED = {
    "members": lambda: collate_ragged([(IMAGE, LABEL), (IMAGE,)]),
    "label for an image": lambda: collate_ragged([(LABEL, NUMBER)]),
    "uint16": lambda: collate_ragged([(IMAGE.astype(np.uint16), NUMBER)]),
    "label for a file": lambda: collate_encoded([{"image": LABEL, "label": NUMBER}]),
    "class for each": lambda: MIX(IMAGES, torch.tensor([NUMBER]), data_keys=["input", "class"]),
    "class in a list": lambda: MIX(IMAGES, [LABEL, LABEL], data_keys=["input", "class"]),
    "boxes": with_targets(boxes=torch.full((2, 3), float(NUMBER)), labels=LABEL),
    "masks": with_targets(masks=torch.full((2, 3), float(NUMBER)), labels=LABEL),
    "label for a target": lambda: FLIP(IMAGES, [LABEL, LABEL], data_keys=["input", "targets"]),
    "valid": lambda: sanitize([{"valid": LABEL}]),
    "label for images": lambda: FLIP({"image": LABEL}),
    "on": streamed({"image": IMAGES, "label": LABEL}, TransformStage(FLIP)),
    "on a label": streamed((IMAGES, LABEL), DecodeStage(on=1)),
    "results": streamed((IMAGES, LABEL), TransformStage(lambda images, label: label, on=(0, 1))),
    "damaged": streamed(collate_encoded([(b"\xff\xd8\xff" + LABEL.encode(), NUMBER)]), DecodeStage()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_hold_no_labels_and_no_pixels(name):
    with pytest.raises(GpuAugError) as raised:
        REFUSED[name]()
    assert_nothing_of_a_batch(" ".join([str(raised.value), *getattr(raised.value, "__notes__", [])]))


def test_logs_and_warnings_hold_no_labels_and_no_pixels(caplog):
    damaged = read_encoded("/nowhere/image.jpg")
    samples = [(encoded(), LABEL, NUMBER, {LABEL}), (damaged, LABEL, NUMBER, {LABEL})]
    batches = [collate_encoded([(*each[:3],) for each in samples]), (IMAGES, [LABEL], NUMBER, {LABEL})]
    with caplog.at_level(logging.DEBUG), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        streamed(batches[0], DecodeStage(on_error="replace"))()
        streamed(batches[1], TransformStage(lambda images: (images, LABEL), on=0))()
        streamed(LABEL)()
    text = " ".join([*caplog.messages, *(str(each.message) for each in warned)])
    assert "/nowhere/image.jpg" in text, "a path says which file is damaged"
    assert "stay on the host" in text
    assert_nothing_of_a_batch(text)


def assert_nothing_of_a_batch(text):
    assert not [each for each in (LABEL, str(NUMBER), str(PIXEL)) if each in text], text
