"""Containers with ``random_apply``, which Kornia runs unless they are containers of mixes."""

import kornia.augmentation as K
import pytest
from kornia.augmentation import auto
from support.comparison.replay import photographs
from support.comparison.values import assert_values

import gpuaug
from gpuaug.fusion.lower import kornia

LEFT = {
    "all": lambda: K.ImageSequential(K.RandomInvert(), K.RandomVerticalFlip(), random_apply=True),
    "weights": lambda: K.AugmentationSequential(
        K.RandomInvert(), K.RandomVerticalFlip(), random_apply=(0, 4), random_apply_weights=[1.0, 5.0]
    ),
    "no weight": lambda: K.ImageSequential(K.RandomInvert(p=1.0), random_apply=1, random_apply_weights=[0.0]),
    "a policy": lambda: K.AugmentationSequential(K.RandomInvert(), auto.TrivialAugment(), random_apply=True),
    "containers": lambda: K.AugmentationSequential(K.ImageSequential(K.RandomErasing(p=1.0)), K.RandomInvert(), random_apply=1),
}


@pytest.mark.parametrize("name", LEFT)
def test_containers_that_pick_modules_run_in_kornia_with_one_warning(name):
    pipeline, images = LEFT[name](), photographs()
    with pytest.warns(gpuaug.GpuAugWarning, match="random_apply is fused for containers of MixUp and CutMix alone") as caught:
        augment = gpuaug.fuse(pipeline)
    assert len(caught) == 1
    assert "left to Kornia" in repr(augment)
    for seed in range(6):
        draws = augment.draw(images.shape, seed=seed)
        assert_values(augment(images, draws=draws), pipeline(images / 255, params=draws.as_kornia()), atol=1e-6)


@pytest.mark.filterwarnings("ignore:No module of Kornia is fused")
def test_random_apply_of_unknown_kornia_versions_is_left_to_kornia(monkeypatch):
    monkeypatch.setattr(kornia, "version", lambda name: "1.3.0")
    for made in (K.ImageSequential(K.RandomMixUpV2(), random_apply=True), auto.TrivialAugment()):
        assert "Kornia 1.3.0 is not one of the tested versions" in str(gpuaug.fuse(made).explain())
