from contextlib import suppress
from dataclasses import replace
from itertools import islice

import pytest
import torch
from support.bench.small_models import use_small_model

import gpuaug
from gpuaug.benchkit import loops, uses
from gpuaug.benchkit.photos import class_folders
from gpuaug.benchkit.windows import Window, summarise

CPU = torch.device("cpu")


@pytest.fixture
def setup(class_folder):
    setup = loops.setup_for(CPU, class_folders(class_folder, None), batch_size=4, workers=0)
    return replace(setup, source_px=48, crop_px=32)


def test_batches_go_on_after_the_last_image_and_come_in_the_same_order_to_each_loop(setup):
    assert len(setup.images) == 24
    first, second = (islice(loops.batches(setup, loops.uint8_images(setup)), 10) for _ in range(2))
    counted = 0
    for (images, labels), (other_images, other_labels) in zip(first, second, strict=True):
        assert images.dtype == torch.uint8
        assert images.shape == (4, 3, setup.source_px, setup.source_px)
        assert torch.equal(images, other_images)
        assert torch.equal(labels, other_labels)
        counted += len(labels)
    assert counted == 40


def test_all_augmentations_hand_the_model_the_same_kind_of_images(setup):
    on_cpu, _ = next(iter(loops.batches(setup, loops.cpu_augmentation(setup))))
    images, _ = next(iter(loops.batches(setup, loops.uint8_images(setup))))
    encoded, _ = next(iter(loops.encoded_batches(setup)))
    whole = loops.fused_augmentation(setup, ragged=True)(gpuaug.DecodeStage()(encoded, device="cpu"))
    for augmented in (on_cpu, loops.kornia_augmentation(setup)(images), loops.fused_augmentation(setup)(images), whole):
        assert augmented.shape == (4, 3, setup.crop_px, setup.crop_px)
        assert augmented.dtype == torch.float32
        assert -2.2 < augmented.min() < 0 < augmented.max() < 2.7, "normalised from [0, 1], not from [0, 255]"


def test_a_step_trains(setup, monkeypatch):
    use_small_model(monkeypatch)
    made = []
    original = loops.torchvision.models.get_model
    monkeypatch.setattr(loops.torchvision.models, "get_model", lambda *a, **k: made.append(original(*a, **k)) or made[-1])
    steps = [loops.classifier_step(setup) for _ in range(2)]
    before = made[0].fc.weight.clone()
    assert torch.equal(before, made[1].fc.weight), "each loop starts from the same weights"
    steps[0](torch.randn(4, 3, setup.crop_px, setup.crop_px), torch.tensor([0, 1, 0, 1]))
    assert not torch.equal(before, made[0].fc.weight)
    assert made[0].fc.out_features == 2


def test_training_on_a_cpu_leaves_cores_to_the_workers(class_folder, monkeypatch):
    monkeypatch.setattr(loops, "allowed_cores", lambda: 2)
    setup = loops.setup_for(CPU, class_folders(class_folder, None), batch_size=4, workers=1)
    torch.set_num_threads(2)
    with suppress(KeyboardInterrupt), loops.reserved_cores(setup):
        assert torch.get_num_threads() == 1
        raise KeyboardInterrupt
    assert torch.get_num_threads() == 2


def rows_of(rounds):
    """Rows of one use, given the steps a second of each variant's rounds; ratios are to the first."""
    measured = {name: [Window(steps, steps, 100, 100) for steps in rates] for name, rates in rounds.items()}
    return [row.record(case="train") for row in summarise(measured, baseline=next(iter(rounds)))]


def test_verdict_explains_a_ratio_that_the_rates_beside_it_contradict():
    rows = rows_of({"serial": [200, 300, 250], "StreamedLoader": [240, 270, 200]})  # 0.9 within rounds, 240 to 250 by rates
    said = list(uses.verdict(rows, CPU))
    assert said[1].startswith("This machine's speed changed from round to round. If a ratio differs from the ratio of the two")
    assert said[2].startswith("On cpu stages run on the processor that trains, so nothing overlaps")
