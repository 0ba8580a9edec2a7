"""Advice about image processors of transformers."""

import sys
from types import SimpleNamespace
from unittest import mock

import torch
from support.files.encoded import encoded
from support.messages.registry import example
from support.processors.stand_ins import TESTED, stand_in

import gpuaug


def processor():
    return stand_in("ViTImageProcessor")


def fused():
    with mock.patch.dict(sys.modules, transformers=SimpleNamespace(__version__=TESTED)):
        return gpuaug.fuse(processor(), ragged=True)


@example("Write gpuaug.fuse(processor, ragged=True)")
def processor_for_images_of_one_size(told):
    with told:
        gpuaug.fuse(processor())
    with mock.patch.dict(sys.modules, transformers=SimpleNamespace(__version__=TESTED)):
        pixels = gpuaug.fuse(processor(), ragged=True)
    assert pixels(gpuaug.collate_ragged([torch.zeros(3, 9, 8, dtype=torch.uint8)])).pixel_values.shape == (1, 3, 32, 48)


@example("Pass the processor alone, gpuaug.fuse(processor, ragged=True), or write its operations as transforms")
def processor_in_a_pipeline(told):
    with told:
        gpuaug.fuse([processor()], ragged=True)
    with mock.patch.dict(sys.modules, transformers=SimpleNamespace(__version__=TESTED)):
        gpuaug.fuse(processor(), ragged=True)


@example("or pass gpuaug.DecodeStage() before this stage")
def processor_before_the_decoder(told):
    batch = gpuaug.collate_encoded([encoded()])
    with told:
        list(gpuaug.StreamedLoader([batch], [fused()], device="cpu"))
    (result,) = gpuaug.StreamedLoader([batch], [gpuaug.DecodeStage(), fused()], device="cpu")
    assert result.pixel_values.shape == (1, 3, 32, 48)
    decoded = gpuaug.collate_ragged([torch.zeros(3, 9, 8, dtype=torch.uint8)])
    assert fused()(decoded).pixel_values.shape == (1, 3, 32, 48)


@example("Pass gpuaug.DecodeStage() or gpuaug.collate_ragged with its default channels")
def grey_images_for_a_processor(told):
    batch = gpuaug.collate_encoded([encoded()])
    with told:
        list(gpuaug.StreamedLoader([batch], [gpuaug.DecodeStage(channels=1), fused()], device="cpu"))
    (result,) = gpuaug.StreamedLoader([batch], [gpuaug.DecodeStage(), fused()], device="cpu")
    assert result.pixel_values.shape == (1, 3, 32, 48)
    decoded = gpuaug.collate_ragged([torch.zeros(3, 9, 8, dtype=torch.uint8)])
    assert fused()(decoded).pixel_values.shape == (1, 3, 32, 48)
