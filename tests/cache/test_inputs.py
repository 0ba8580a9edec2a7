import itertools

import numpy as np
import pytest
import torch
from support.cache.cached_loaders import COUNT, Files, assert_equal, encoder, loader, rows_of
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug
from gpuaug import FeatureCache
from gpuaug.cache.inputs import digest_of


def read(path):
    return gpuaug.read_encoded(path)


def content(path):
    with open(path, "rb") as file:
        return file.read()


def content_of_the_first(path):
    return content(path.replace(path[-7:], "000.png"))


def boxes(index, shift):
    return torch.tensor([[1.0 + shift, 2, 9 + index / 8, 14]])


def boxes_of(batch):
    return [target["boxes"] for target in batch["target"]]


def target_of(batch):
    return batch["target"]


FLIP = v2.Compose([v2.RandomHorizontalFlip(1.0), v2.Resize((12, 12)), v2.ToDtype(torch.float32, scale=True)])
WITH_BOXES = {"image": "input", "target": "targets"}

# Target of a sample, from (index, shift); stage that writes it, and its members; values in the batch.
TARGETS = {
    "boxes in a target dict": (lambda index, shift: {"boxes": boxes(index, shift)}, None, WITH_BOXES, boxes_of),
    "number": (lambda index, shift: index + 100 * shift, lambda target: target * 2, "target", target_of),
    "array": (lambda index, shift: boxes(index, shift).numpy(), lambda target: target * 2, "target", target_of),
    "list": (lambda index, shift: [index, shift], lambda target: torch.stack(list(target), 1), "target", target_of),
    "dict that a tensor replaces": (
        lambda index, shift: {"index": index, "shift": shift},
        *(lambda targets: torch.tensor([target["index"] + 100 * target["shift"] for target in targets]), "target", target_of),
    ),
}


# Each target once, and each kind of image once; all pairs in the long variant.
SHORT = [*zip(TARGETS, itertools.cycle((read, content, content_of_the_first)), strict=False)]


@pytest.mark.parametrize(
    ("name", "image"),
    [
        pytest.param(*pair, marks=[pytest.mark.slow] * (pair not in SHORT))
        for pair in itertools.product(TARGETS, (read, content, content_of_the_first))
    ],
)
def test_a_row_is_read_only_for_the_target_from_which_it_was_made(name, image, paths, tmp_path):
    target, transform, on, written = TARGETS[name]
    captions = itertools.count()  # no stage reads them: they may change

    def begin(cache, shift):
        def sample(path, index):
            return {
                "image": image(path),
                "label": index,
                "target": target(index, shift),
                "caption": f"caption {next(captions)}",
            }

        files = Files(paths, sample)
        augment = gpuaug.fuse(FLIP, ragged=True)
        stages = [
            gpuaug.DecodeStage(on="image"),
            gpuaug.TransformStage(augment, on="image" if transform else on),
            *([gpuaug.TransformStage(transform, on=on, name="target")] if transform else []),
            gpuaug.FeatureStage(encoder(), on="image", into="latents", cache=cache),
        ]
        return loader(files if cache is None else cache.wrap(files), stages)

    cache = FeatureCache(tmp_path / "cache")
    for shift, encoded in ((0, COUNT), (0, 0), (1, COUNT), (0, 0), (1, 0)):
        with begin(cache, shift) as streamed, begin(None, shift) as expected:
            assert_equal(rows_of(streamed, written), rows_of(expected, written))
        assert streamed.stats().rows_encoded == encoded, shift
    assert f" {2 * COUNT} rows" in str(cache)


def test_a_digest_is_of_all_values():
    long = np.zeros(5000)
    changed = long.copy()
    changed[2500] = 1
    values = [
        *("1", 1, 1.5, None, b"1", ["1", "2"], ["12"], {"a": 1}),
        *(long, changed, long.reshape(50, 100), long.astype(np.float32), np.array(["1", None], object)),
        *(torch.zeros(5000), torch.from_numpy(changed).float(), torch.zeros(5000, dtype=torch.bfloat16)),
        *(torch.zeros(2, 2).to_sparse(), torch.nested.nested_tensor([torch.zeros(2)]), torch.tensor(1)),
        *(tv_tensors.Mask(torch.ones(2, 2)), torch.zeros(0)),
    ]
    digests = [digest_of(value, 8) for value in values]
    assert len(set(digests)) == len(values)
    assert [digest_of(value, 8) for value in values] == digests
