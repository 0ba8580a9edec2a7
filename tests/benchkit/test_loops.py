import json
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


def test_settings_are_plain_json_and_keep_the_users_paths_out(setup, class_folder):
    settings = json.dumps(setup.settings())
    assert str(class_folder) not in settings
    assert json.loads(settings)["classes"] == 2
    assert json.loads(settings)["batch_size"] == 4


def test_discarded_steps_cover_what_the_loader_prefetches(class_folder):
    images = class_folders(class_folder, None)
    setup = loops.setup_for(CPU, images, batch_size=4, workers=3)
    loader = loops.batches(setup, None)
    assert setup.discard >= loader.num_workers * loader.prefetch_factor


def test_the_fused_pipeline_stands_beside_kornia_in_the_loop_and_alone(setup):
    names = {use.case: [variant.name for variant in use.variants] for use in uses.three_uses(setup)}
    ours = {"StreamedLoader", "StreamedLoader, fused", "StreamedLoader, from files"}
    assert ours <= set(names["train resnet18"])
    assert names["augment alone"] == ["Kornia, eager", "gpuaug.fuse"]


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


@pytest.mark.parametrize(
    ("ours", "text"),
    [
        (
            [300, 600],
            "train: 'StreamedLoader' is faster than 'serial': 1.50x (2 rounds: 1.50 to 1.50). 'StreamedLoader' reaches 75% of",
        ),
        (
            [500, 600],
            "train: 'StreamedLoader' is faster than 'serial': 2.00x (2 rounds: 1.50 to 2.50). 'StreamedLoader' differs by less",
        ),
        (
            [100, 200],
            "train: 'StreamedLoader' is slower than 'serial': 0.50x (2 rounds: 0.50 to 0.50). 'StreamedLoader' reaches 25% of",
        ),
        ([180, 480], "train: 'StreamedLoader' and 'serial' differ by less than the rounds: 1.05x (2 rounds: 0.90 to 1.20)."),
    ],
)
def test_verdict_compares_the_best_with_and_without_within_rounds(ours, text):
    rows = rows_of({"serial": [200, 400], "StreamedLoader": ours, "workers": [50, 50], uses._STEP_ALONE: [400, 800]})
    first, *more = uses.verdict(rows, torch.device("cuda"))
    assert first.startswith(text)
    assert more[-1] == "To find the bound of your own loop, run: gpuaug profile train.py:make."
    assert not [sentence for sentence in more if "in line" in sentence]


def test_verdict_explains_a_ratio_that_the_rates_beside_it_contradict():
    rows = rows_of({"serial": [200, 300, 250], "StreamedLoader": [240, 270, 200]})  # 0.9 within rounds, 240 to 250 by rates
    said = list(uses.verdict(rows, CPU))
    assert said[1].startswith("This machine's speed changed from round to round. If a ratio differs from the ratio of the two")
    assert said[2].startswith("On cpu stages run on the processor that trains, so nothing overlaps")
