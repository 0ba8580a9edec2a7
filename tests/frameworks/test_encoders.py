"""Encoders of transformers, diffusers and timm, with random weights: eager, and as from a graph, at every depth."""

import re
from functools import partial

import pytest
import torch
from support.comparison.values import assert_values
from support.gpu.host_graphs import install, on_lanes
from support.process.examples import run_example
from support.public.torch_settings import without_tf32
from torch import nn

from gpuaug import DeviceError, FeatureStage, GpuAugWarning, StreamedLoader
from gpuaug.core import batch as batches

pytestmark = pytest.mark.frameworks


def clip():
    transformers = pytest.importorskip("transformers")
    width = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**width, "vocab_size": 50, "max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 49}
    vision = {**width, "image_size": 32, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=12)
    return transformers.CLIPModel(config)


def t5():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    return transformers.T5EncoderModel(config)


def dinov2():
    transformers = pytest.importorskip("transformers")
    width = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.Dinov2Model(transformers.Dinov2Config(**width, image_size=28, patch_size=14))


def vae():
    diffusers = pytest.importorskip("diffusers")
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return diffusers.AutoencoderKL(**blocks, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1)


def vit():
    timm = pytest.importorskip("timm")
    return timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=2, num_heads=2, num_classes=0)


def sampled(encoded):
    return encoded.latent_dist.sample()


def mode(encoded):
    return encoded.latent_dist.mode()


def penultimate(encoded):
    return encoded.hidden_states[-2]


IMAGES = {0: "pixel_values"}
TEXT = {1: "input_ids", 2: "attention_mask"}
CASES = {
    "CLIP, pictures": (clip, lambda model: model.vision_model, IMAGES, None),
    "CLIP, pooled": (clip, lambda model: model.vision_model, IMAGES, "pooler_output"),
    "CLIP, picture features": (clip, lambda model: model.get_image_features, IMAGES, None),
    "CLIP, text": (clip, lambda model: model.text_model, TEXT, "last_hidden_state"),
    "CLIP, text features": (clip, lambda model: model.get_text_features, TEXT, None),
    "CLIP, penultimate": (clip, lambda model: partial(model.text_model, output_hidden_states=True), TEXT, penultimate),
    "T5": (t5, lambda model: model, TEXT, "last_hidden_state"),
    "T5, tuple": (t5, lambda model: partial(model, return_dict=False), TEXT, 0),
    "DINOv2": (dinov2, lambda model: model, IMAGES, None),
    "AutoencoderKL, mode": (vae, lambda model: model.encode, 0, mode),
    "AutoencoderKL, sample": (vae, lambda model: model.encode, 0, sampled),
    "AutoencoderKL, tuple": (vae, lambda model: partial(model.encode, return_dict=False), 0, lambda one: one[0].mode()),
    "timm": (vit, lambda model: model, 0, None),
    "timm, features": (vit, lambda model: model.forward_features, 0, None),
    "timm, intermediates": (vit, lambda model: partial(model.forward_intermediates, indices=1), 0, 1),
}


def source():
    torch.manual_seed(1)
    made = []
    for index in range(5):
        size = (4, 2)[index % 2]
        mask = torch.ones(size, 8, dtype=torch.int64)
        mask[0, 5:] = index % 3 == 0
        made.append((torch.rand(size, 3, 32, 32), torch.randint(1, 49, (size, 8)), mask))
    return made


def called(encoder, on, output, batch):
    inputs = [batch[index] for index in (on if isinstance(on, dict) else [on])]
    with torch.no_grad():
        result = encoder(**dict(zip(on.values(), inputs, strict=True))) if isinstance(on, dict) else encoder(*inputs)
    if output is None:
        return result
    return output(result) if callable(output) else result[output]


@pytest.mark.parametrize("name", CASES)
def test_encoder_gives_what_it_gives_in_the_loop(name, monkeypatch):
    forms = install(monkeypatch)
    make, chosen, on, output = CASES[name]
    torch.manual_seed(0)
    model = make().requires_grad_(False)
    data = [(images[..., :28, :28], *others) if make is dinov2 else (images, *others) for images, *others in source()]
    encoder = chosen(model)
    stage = FeatureStage(encoder, on=on, into=3, output=output)
    model.eval()
    reference = list(StreamedLoader(data, [stage], seed=3, device="cpu"))
    for depth in (0, 2):
        forms.clear()
        for got, want, batch in zip(on_lanes(data, stage, depth=depth, seed=3), reference, data, strict=True):
            own = called(encoder, on, output, batch)
            assert type(got[3]) is type(own)
            for a, b, c in zip(batches.tensors(got[3]), batches.tensors(want[3]), batches.tensors(own), strict=True):
                assert_values(a, b)
                if output is not sampled:
                    torch.testing.assert_close(a, c)
        assert [form for form, _ in forms].count("replayed") == 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_captured_encoder_gives_what_it_gives_in_the_loop_on_a_gpu(name):
    with without_tf32():
        check_captured(name)


def check_captured(name):
    make, chosen, on, output = CASES[name]
    torch.manual_seed(0)
    model = make().eval().requires_grad_(False).cuda()
    data = [(images[..., :28, :28], *others) if make is dinov2 else (images, *others) for images, *others in source()] * 2
    data = [tuple(value.contiguous().pin_memory() for value in batch) for batch in data]
    encoder = chosen(model)
    results = {}
    for depth in (0, 2, 5):
        loader = StreamedLoader(data, [FeatureStage(encoder, on=on, into=3, output=output)], depth=depth, seed=3)
        results[depth] = [[tensor.clone() for tensor in batches.tensors(batch[3])] for batch in loader]
        stats = loader.stats()
        assert (stats.captured, stats.replayed, stats.eager) == (2, 8, 2)
    for of_depths in zip(data, *results.values(), strict=True):
        batch, want, *others = of_depths
        for got in others:
            for a, b in zip(got, want, strict=True):
                assert_values(a, b)
        if output is not sampled:
            own = called(encoder, on, output, [value.cuda() for value in batch])
            for a, b in zip(want, batches.tensors(own), strict=True):
                torch.testing.assert_close(a, b)


def test_an_encoder_spread_over_devices_or_offloaded_is_refused():
    accelerate = pytest.importorskip("accelerate")
    model = clip().vision_model.requires_grad_(False)
    offloaded = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(DeviceError, match=r"must be on the loader's device, cpu, got .* on meta"):
        StreamedLoader([], [FeatureStage(offloaded, on=IMAGES, into=3)], device="cpu")


def test_an_encoder_with_hooks_of_accelerate_is_not_captured(monkeypatch):
    hooks = pytest.importorskip("accelerate.hooks")
    forms = install(monkeypatch)
    model = nn.Linear(3, 2).requires_grad_(False)
    hooks.add_hook_to_module(model, hooks.AlignDevicesHook("cpu"))
    with pytest.warns(GpuAugWarning, match="it has forward hooks"):
        list(on_lanes([torch.rand(2, 3)] * 3, FeatureStage(model)))
    assert forms == []


def test_example_of_latents_with_diffusers(class_folder, tmp_path, capsys):
    """Moments of AutoencoderKL are recorded and read, beside states of CLIPTextModel."""
    pytest.importorskip("diffusers")
    small = ["--data", class_folder, "--workers", 0, "--side", 64, "--batch-size", 2, "--steps", 60]
    run_example("latent_lora", *small, "--diffusers", "--cache", tmp_path / "latents")
    encoded, read = map(int, re.search(r"(\d+) latents encoded, (\d+) read", capsys.readouterr().out).groups())
    assert min(encoded, read) > 0
