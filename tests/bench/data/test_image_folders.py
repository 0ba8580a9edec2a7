"""Labelled images from folders."""

from pathlib import Path

import torch

from bench.data import character_images, image_folders, pipelines


def test_a_folder_is_split_the_same_way_every_time(class_folder):
    first, second = image_folders.split(class_folder), image_folders.split(class_folder)
    assert first.classes == ["cat", "dog"]
    assert (len(first.train), len(first.val)) == (19, 5)
    assert not set(first.train.samples) & set(first.val.samples)
    assert first.val.samples == second.val.samples


def test_train_and_val_are_taken_as_they_are(character_folder):
    split = image_folders.split(character_folder)
    assert split.classes == sorted(character_images.CLASSES)
    assert {Path(path).parts[-3] for path, _ in split.train.samples} == {"train"}
    assert {Path(path).parts[-3] for path, _ in split.val.samples} == {"val"}


def test_images_in_memory_are_those_in_the_files_and_are_tested_in_the_middle(class_folder):
    images = image_folders.split(class_folder).train
    in_memory = images.in_memory()
    for index in (0, 7):
        assert torch.equal(images[index][0], in_memory[index][0])
        assert images[index][1] == in_memory[index][1] == images.samples[index][1]
    scene = torch.zeros(3, 64, 128, dtype=torch.uint8)
    scene[:, :, 30:98] = 255
    tensors, labels = image_folders.validation_tensors(image_folders.Images([("", 1)], [scene]), 32)
    assert tensors.shape == (1, 3, 32, 32)
    assert labels.tolist() == [1]
    white = (1 - torch.tensor(pipelines.MEAN)) / torch.tensor(pipelines.STD)
    assert (tensors[0].mean((1, 2)) - white).abs().max() < 1e-4
