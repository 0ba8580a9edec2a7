"""The suite of accuracy: rows differ only in who augments."""

import json
from argparse import Namespace
from contextlib import ExitStack

import pytest
import torch

from bench import __main__
from bench.data import image_folders
from bench.harness import measurement
from bench.suites.augmentation import accuracy
from gpuaug.benchkit import results

NAMES = ["torchvision, workers", "gpuaug, from torchvision", "gpuaug, antialiased", "gpuaug", "gpuaug, scaled"]
TINY = ["--device", "cpu", "--size", "32", "--batch", "8", "--epochs", "1", "--repeats", "1", "--workers", "0"]


def test_all_rows_have_the_same_images_in_the_same_order(class_folder):
    images = image_folders.split(class_folder).train
    # As their own labels: what a row does to an image leaves them alone.
    numbered = image_folders.Images([(path, index) for index, (path, _) in enumerate(images.samples)])
    options = Namespace(device=torch.device("cpu"), size=16, batch=(4,), workers=0)
    orders = {}
    for name in NAMES:
        with ExitStack() as stack:
            batches = accuracy.batches(name, numbered, 5, options, stack)
            epochs = [list(batches) for _ in range(2)]
        orders[name] = [[labels.tolist() for _, labels in epoch] for epoch in epochs]
        assert {tuple(images_of_batch.shape) for epoch in epochs for images_of_batch, _ in epoch} == {(4, 3, 16, 16)}
    assert all(order == orders[NAMES[0]] for order in orders.values())
    first_epoch, second_epoch = orders[NAMES[0]]
    assert len(first_epoch) == 19 // 4
    assert first_epoch != second_epoch, "an epoch of its own order"


def test_trains_every_row_and_says_how_well(class_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(accuracy.models, "resnet18", accuracy.models.squeezenet1_1)  # smaller
    path = tmp_path / "accuracy.json"
    assert __main__.main(["accuracy", *TINY, "--data", str(class_folder), "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    results.check(result)
    assert [row["name"] for row in result["rows"]] == NAMES
    for row in result["rows"]:
        assert row["top1_low_percent"] <= row["top1_percent"] <= row["top1_high_percent"]
        assert row["top1_percent"] % 20 == pytest.approx(0, abs=1e-4), "of five images"
        assert min(row["images_per_s"], row["wall_s"], row["ratio"]) > 0
    settings = result["settings"]
    assert (settings["images"], settings["train_images"], settings["val_images"], settings["classes"]) == (
        "the user's",
        19,
        5,
        2,
    )
    assert (settings["epochs"], settings["repeats"], settings["batch"]) == (1, 1, [8])
    assert "data" not in settings, "a path says nothing"
    assert "accuracy: seed 0, gpuaug, antialiased: " in capsys.readouterr().out


@pytest.fixture
def pretended(monkeypatch, tmp_path, class_folder):
    """The suite over three seeds, where the trainings are over at once."""
    ran = []

    def train(name, split, test, seed, options):
        ran.append((seed, name))
        number = NAMES.index(name)
        rates = ((100, 110, 120), (150, 150, 150), (200, 200, 200), (300, 250, 340), (90, 80, 70))[number]
        return {"top1_percent": 70.0 + number + 3 * seed, "images_per_s": float(rates[seed]), "wall_s": 5.0 + seed}

    monkeypatch.setattr(accuracy, "train", train)
    monkeypatch.setattr(measurement, "release", lambda device: None)
    path = tmp_path / "results" / "accuracy.json"
    result = accuracy.main([*TINY, "--repeats", "3", "--data", str(class_folder), "--json", str(path)])
    return result, ran, path


def test_figures_are_of_all_seeds_and_ratios_of_one(pretended):
    result, ran, _ = pretended
    assert [name for seed, name in ran if seed == 0] == NAMES
    assert [name for seed, name in ran if seed == 1] == NAMES[::-1]
    baseline, *_, plain, _ = result["rows"]
    assert (plain["top1_percent"], plain["top1_low_percent"], plain["top1_high_percent"]) == (76.0, 73.0, 79.0)
    assert (plain["images_per_s"], plain["rounds"], plain["wall_s"]) == (300.0, [300.0, 250.0, 340.0], 6.0)
    assert plain["ratio"] == pytest.approx(340 / 120), "that of the medians is 300 / 110"
    assert (plain["ratio_low"], plain["ratio_high"]) == (pytest.approx(250 / 110), 3.0)
    assert baseline["ratio"] == 1


def test_top_1_is_the_share_of_right_answers():
    class Answers(torch.nn.Module):
        def forward(self, images):
            return torch.nn.functional.one_hot(images[:, 0].long(), 4).float()

    images, labels = torch.tensor([[0.0], [1.0], [2.0], [3.0]]).repeat(100, 1), torch.tensor([0, 1, 2, 0]).repeat(100)
    assert accuracy.top1_percent(Answers(), (images, labels), None) == 75
