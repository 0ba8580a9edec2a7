from contextlib import suppress
from dataclasses import replace

import pytest
import torch

import gpuaug
from gpuaug.benchkit import loops
from gpuaug.benchkit.photos import class_folders

CPU = torch.device("cpu")


@pytest.fixture
def setup(class_folder):
    setup = loops.setup_for(CPU, class_folders(class_folder, None), batch_size=4, workers=0)
    return replace(setup, source_px=48, crop_px=32)


def test_all_augmentations_hand_the_model_the_same_kind_of_images(setup):
    on_cpu, _ = next(iter(loops.batches(setup, loops.cpu_augmentation(setup))))
    images, _ = next(iter(loops.batches(setup, loops.to_uint8_images(setup))))
    encoded, _ = next(iter(loops.encoded_batches(setup)))
    whole = loops.fused_augmentation(setup, ragged=True)(gpuaug.DecodeStage()(encoded, device="cpu"))
    for augmented in (on_cpu, loops.kornia_augmentation(setup)(images), loops.fused_augmentation(setup)(images), whole):
        assert augmented.shape == (4, 3, setup.crop_px, setup.crop_px)
        assert augmented.dtype == torch.float32
        assert -2.2 < augmented.min() < 0 < augmented.max() < 2.7, "normalised from [0, 1], not from [0, 255]"


def test_training_on_a_cpu_leaves_cores_to_the_workers(class_folder, monkeypatch):
    monkeypatch.setattr(loops, "allowed_cores", lambda: 2)
    setup = loops.setup_for(CPU, class_folders(class_folder, None), batch_size=4, workers=1)
    torch.set_num_threads(2)
    with suppress(KeyboardInterrupt), loops.reserved_cores(setup):
        assert torch.get_num_threads() == 1
        raise KeyboardInterrupt
    assert torch.get_num_threads() == 2
