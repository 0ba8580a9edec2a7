"""The suites of images of different sizes, of several views and of detection."""

import importlib
import json

import pytest
import torch

from gpuaug.benchkit import results

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("kornia")
pytest.importorskip("torchvision")

CPU = torch.device("cpu")
TINY = ["--device", "cpu", "--batch", "2", "--seconds", "0.02", "--repeats", "1", "--workers", "0"]


def module(name):
    return importlib.import_module(f"bench.{name}")


def run(suite, tmp_path, *flags):
    path = tmp_path / f"{suite}.json"
    assert module("run").main([suite, *TINY, *flags, "--results", str(tmp_path)]) == 0
    made = json.loads(path.read_text())
    results.check(made)
    assert made["suite"] == suite
    assert all(row["images_per_s"] > 0 for row in made["rows"])
    return made


def names(made):
    found = {}
    for row in made["rows"]:
        found.setdefault(row.get("case"), []).append(row["name"])
    return found


def test_ragged_has_its_rows_in_both_places(tmp_path):
    made = run("ragged", tmp_path, "--size", "16", "--sides", "20,40")
    ours = ["gpuaug, workers", "gpuaug"]
    assert names(made) == {
        "on the card": ["Kornia, image by image", "gpuaug"],
        "on the card, antialiased": ["gpuaug"],
        "from the host": ours,
        "from the host, antialiased": ["torchvision, workers", *ours],
    }
    assert {row["reason"] for row in made["settings"]["skipped"] if row["name"] == "DALI"} == {"needs a GPU"}
    assert len(made["settings"]["skipped"]) == 4
    assert {row["name"] for row in made["rows"] if "host_ms" in row} == {"Kornia, image by image", "gpuaug"}


def test_ragged_images_differ_in_size_and_are_the_same_every_time():
    data = module("data")
    first, second = (data.RaggedImages((20, 40), count=5) for _ in range(2))
    sides = {side for image in first.images for side in image.shape[1:]}
    assert len(sides) > 3
    assert min(sides) >= 20
    assert max(sides) <= 40
    assert all(torch.equal(a, b) for a, b in zip(first.images, second.images, strict=True))
    inverted = first.transformed(lambda image: 255 - image)
    assert torch.equal(inverted[3][0], 255 - first[3][0])
    assert inverted[3][1] == first[3][1]


def test_dali_takes_images_of_different_sizes_and_antialiases_when_told():
    pytest.importorskip("nvidia.dali")
    dali = module("dali")
    images = [torch.randint(256, (height, 150, 3), dtype=torch.uint8) for height in (120, 200)]
    spread = {}
    for antialias in (False, True):
        call = dali.build_ragged(images, 16, antialias=antialias, device=CPU)
        found = torch.stack([call() for _ in range(8)])
        assert found.shape == (8, 2, 3, 16, 16)
        spread[antialias] = found.float().std()
    # Noise that is averaged over several pixels varies less.
    assert spread[True] < 0.8 * spread[False]


def test_views_has_kornia_and_both_ways_of_ours(tmp_path):
    made = run("views", tmp_path, "--size", "32")
    assert names(made) == {None: ["Kornia", "gpuaug, a call for each", "gpuaug"]}
    assert all(row["host_ms"] > 0 and row["ratio"] > 0 for row in made["rows"])


def test_all_ways_make_the_same_views():
    views = module("views")
    options = module("common").read(module("common").parser("", batch="2"), ["--device", "cpu", "--size", "32"])
    kornia, one_by_one, together = (row.call() for row in views.variants(options, 2, None))
    shapes = [(2, 3, 28, 28)] * 2 + [(2, 3, 12, 12)] * 8
    assert [tuple(view.shape) for view in kornia] == [tuple(view.shape) for view in one_by_one] == shapes
    assert [tuple(view.shape) for view in together] == [(4, 3, 28, 28), (16, 3, 12, 12)]
    assert {view.dtype for view in [*kornia, *one_by_one, *together]} == {torch.bfloat16}


def test_detection_has_its_rows_with_whatever_follows(tmp_path):
    made = run("detection", tmp_path, "--size", "24", "--side", "48", "--batch", "2,3")
    rows = ["torchvision, workers", "Kornia, image by image", "gpuaug, workers", "gpuaug"]
    sizes = {(row["case"], row["batch_size"]) for row in made["rows"]}
    assert sizes == {("images", 2), ("boxes", 2), ("boxes and masks", 2), ("boxes and masks", 3)}
    for case, size in sizes:
        assert [row["name"] for row in made["rows"] if (row["case"], row["batch_size"]) == (case, size)] == rows


def test_scenes_have_objects_inside_their_images():
    detection = module("detection")
    scenes = detection.Scenes(60, ("boxes", "labels", "masks"), count=30)
    shapes = set()
    for image, target in scenes:
        height, width = image.shape[1:]
        shapes.add((height > width, height, width))
        boxes, masks = target["boxes"], target["masks"]
        assert max(height, width) == 60
        assert len(boxes) == len(target["labels"]) == len(masks) >= 1
        assert (boxes[:, :2] >= 0).all()
        assert (boxes[:, 2:] <= torch.tensor([width, height])).all()
        assert (boxes[:, 2:] > boxes[:, :2]).all()
        assert masks.shape[1:] == (height, width)
        for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
            assert mask.sum() == mask[top:bottom, left:right].sum() > 0
    assert len(shapes) > 4
    assert 3 < sum(len(target["labels"]) for _, target in scenes) / 30 < 11


@pytest.mark.parametrize("keys", [(), ("boxes", "labels"), ("boxes", "labels", "masks")], ids=len)
def test_peers_of_detection_take_what_there_is(keys):
    detection = module("detection")
    scenes = detection.Scenes(48, keys, count=3)
    on_worker = scenes.transformed(detection.OnWorker(24))
    images, targets = detection.stacked([on_worker[index] for index in range(3)])
    assert images.shape == (3, 3, 24, 24)
    for target in targets:
        assert set(target) == set(keys)
        assert {type(value) for value in target.values()} <= {torch.Tensor}
        assert len({len(value) for value in target.values()}) <= 1
    found = detection.one_by_one(24, scenes.items)
    first = found[0] if keys else [found[0]]
    assert first[0].shape == (1, 3, 24, 24)
    assert len(first) == 1 + ("boxes" in keys) + ("masks" in keys)
    if "masks" in keys:
        assert first[2].shape == (1, len(scenes.items[0][1]["masks"]), 24, 24)


@pytest.mark.gpu
@pytest.mark.parametrize("suite", ["ragged", "views", "detection"])
def test_suites_run_on_a_gpu(suite, tmp_path):
    flags = {"ragged": ["--sides", "40,80"], "views": [], "detection": ["--side", "80"]}[suite]
    made = module(suite).main(
        ["--device", "cuda", "--size", "64", "--batch", "4", "--seconds", "0.02", "--repeats", "1", "--workers", "2", *flags]
    )
    results.check(made)
    ours = [row for row in made["rows"] if row["name"] == "gpuaug"]
    assert all(row["host_ms"] > 0 for row in ours)
    assert any(row["gpu_ms"] > 0 for row in ours)
