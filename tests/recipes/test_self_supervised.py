"""Pretraining without labels: DINOv2, DINOv3, MAE, SimMIM, SimCLR and BYOL, one recipe for each kind of crop."""

import pytest
import torch
from support.ops.recipes import Recipe, assert_equals_torchvision, cases, left_to_the_library
from torchvision import transforms as v1
from torchvision.transforms import v2

import gpuaug
from bench.data.recipes import self_supervised as written


def crops(source, transforms):
    """The recipes of both global crops and of a local one, which are pipelines of their own."""
    return {
        "global 1": Recipe(source, lambda: written.dino_global_1(32, transforms=transforms), 3, 4),
        # A pixel at the threshold may fall on either side of it.
        "global 2": Recipe(
            source, lambda: written.dino_global_2(32, transforms=transforms), 3, 4, share=1e-3, units_of_bytes=True
        ),
        "local": Recipe(source, lambda: written.dino_local(16, transforms=transforms), 3, 4),
    }


RECIPES = {
    **{f"DINOv2, {name}": recipe for name, recipe in crops(written.DINO_2, v1).items()},
    **{f"DINOv3, {name}": recipe for name, recipe in crops(written.DINO_3, v2).items()},
    "DINOv2, linear": Recipe(written.DINO_2, lambda: written.dino_2_linear(32), 1, 2),
    "DINOv3, validation": Recipe(written.DINO_3, lambda: written.dino_3_validation(36, 32), 1, 1),
    "MAE": Recipe(written.MAE, lambda: written.mae(32), 1, 2),
    "SimMIM": Recipe(written.SIM_MIM, lambda: written.sim_mim(32), 1, 2),
    "SimCLR": Recipe(written.SIM_CLR, lambda: written.sim_clr(32), 3, 4),
    # It calls the pipeline on a batch.
    "BYOL": Recipe(written.BYOL, lambda: written.byol(32), 4, dtype=torch.float32),
}


@pytest.mark.parametrize(("recipe", "ragged"), cases(RECIPES))
def test_recipe_is_fused_entirely_and_equals_torchvision(recipe, ragged):
    assert_equals_torchvision(recipe, ragged)


def test_views_of_global_crops_cost_no_launch_more():
    """Each of the two pipelines of SimCLR, and all local crops of DINO, are one call."""
    augment = gpuaug.fuse(RECIPES["SimCLR"].make(), views=2)
    assert augment.explain((4, 3, 64, 80)).launches == RECIPES["SimCLR"].launches


class GaussianBlur:
    """A blur of SimCLR's own, as any class with code of its own."""

    def __call__(self, image):
        return v2.functional.gaussian_blur(image, [3, 3])


@left_to_the_library
def test_class_of_their_own_is_left_to_torchvision():
    explanation = gpuaug.fuse(v1.Compose([v1.RandomHorizontalFlip(), GaussianBlur(), v1.ToTensor()])).explain((4, 3, 64, 80))
    assert [(line.modules, line.reason) for line in explanation.lines if line.reason] == [
        (("GaussianBlur_1",), "its operations are unknown")
    ]
