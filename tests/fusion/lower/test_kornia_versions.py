"""Which versions of Kornia modules are lowered of, and what is said of others."""

import inspect
import re
from importlib.metadata import version

import kornia.augmentation as K
import pytest
from kornia.augmentation import auto
from support.replay import photographs
from torch import nn

import gpuaug
from gpuaug.fusion.lower import kornia


@pytest.fixture
def another_kornia(monkeypatch):
    kornia.warn_of_version.cache_clear()
    monkeypatch.setattr(kornia, "version", lambda name: "1.3.0rc1")
    yield
    kornia.warn_of_version.cache_clear()


UNTESTED = "Kornia 1.3.0rc1 is not one of the versions compared with (kornia>=0.9,<0.10)"
INSTALL = 'Run pip install "kornia>=0.9,<0.10".'


def test_unknown_kornia_version_is_warned_of_once_in_a_process(another_kornia):
    text = re.escape(f"Every module is left to Kornia, with tens of launches a batch for each, because {UNTESTED}")
    with pytest.warns(gpuaug.GpuAugWarning, match=text) as caught:
        augment = gpuaug.fuse([K.RandomHorizontalFlip(), K.RandomInvert()])
    assert len(caught) == 1
    gpuaug.fuse([auto.RandAugment(2, 10), nn.Identity()])
    assert augment(photographs()).shape == (3, 3, 32, 48)
    assert UNTESTED in str(augment.explain())


def test_ragged_true_is_refused_with_an_unknown_kornia_version(another_kornia):
    with pytest.raises(gpuaug.ArgumentError, match=f"was compared with where ragged=True, .* {re.escape(INSTALL)}"):
        gpuaug.fuse(K.RandomResizedCrop((8, 8)), ragged=True)


@pytest.mark.parametrize(
    ("found", "compared"),
    [
        ("0.9.0", True),
        ("0.9.1.post1", True),
        ("0.9rc1", True),
        ("0.10.0", False),
        ("0.10rc1", False),
        ("0.8.2", False),
        ("1.9", False),
    ],
)
def test_untested_version_tells_compared_versions_from_others(found, compared, monkeypatch):
    monkeypatch.setattr(kornia, "version", lambda name: found)
    assert (kornia.untested_version() is None) is compared


def test_installed_kornia_is_a_version_compared_with():
    """CI installs the newest Kornia there is, so that a release to compare with is known at once."""
    assert kornia.untested_version() is None, (
        f"Kornia {version('kornia')} is installed, and the ops were compared with {kornia.REQUIREMENT} alone: every user "
        "of it has all modules left to Kornia. Widen TESTED in gpuaug/fusion/lower/kornia.py, run tests/fusion, make the ops "
        "agree, and update docs/fuse.md."
    )


KNOWN_PARAMETERS = {
    "RandomHorizontalFlip": "p p_batch same_on_batch keepdim",
    "RandomVerticalFlip": "p p_batch same_on_batch keepdim",
    "RandomCrop": "size padding pad_if_needed fill padding_mode resample same_on_batch align_corners p keepdim cropping_mode",
    "CenterCrop": "size align_corners resample p keepdim cropping_mode",
    "PadTo": "size pad_mode pad_value keepdim crop_if_exceeds",
    "RandomResizedCrop": "size scale ratio resample same_on_batch align_corners p keepdim cropping_mode",
    "Resize": "size side resample align_corners antialias p keepdim",
    "RandomRotation": "degrees resample same_on_batch align_corners p keepdim",
    "RandomRotation90": "times resample same_on_batch align_corners p keepdim",
    "RandomAffine": "degrees translate scale shear resample same_on_batch align_corners padding_mode fill_value p keepdim",
    "RandomShear": "shear resample same_on_batch align_corners padding_mode p keepdim",
    "RandomTranslate": "translate_x translate_y resample same_on_batch align_corners padding_mode p keepdim",
    "RandomPerspective": "distortion_scale resample same_on_batch align_corners p keepdim sampling_method",
    "RandomBrightness": "brightness clip_output same_on_batch p keepdim",
    "RandomContrast": "contrast clip_output same_on_batch p keepdim",
    "RandomSaturation": "saturation same_on_batch p keepdim",
    "RandomHue": "hue same_on_batch p keepdim",
    "RandomGamma": "gamma gain same_on_batch p keepdim",
    "RandomInvert": "max_val same_on_batch p keepdim",
    "RandomSolarize": "thresholds additions same_on_batch p keepdim",
    "RandomPosterize": "bits same_on_batch p keepdim",
    "RandomSnow": "snow_coefficient brightness same_on_batch p keepdim",
    "RandomGrayscale": "rgb_weights same_on_batch p keepdim",
    "RandomChannelShuffle": "same_on_batch p keepdim",
    "RandomChannelDropout": "num_drop_channels fill_value same_on_batch p keepdim",
    "Normalize": "mean std p keepdim",
    "Denormalize": "mean std p keepdim",
    "RandomGaussianNoise": "mean std same_on_batch p keepdim",
    "RandomErasing": "scale ratio value same_on_batch p keepdim",
    "ColorJitter": "brightness contrast saturation hue same_on_batch p keepdim order",
    "ColorJiggle": "brightness contrast saturation hue same_on_batch p keepdim order",
    "RandomGaussianBlur": "kernel_size sigma border_type separable same_on_batch p keepdim",
    "RandomEqualize": "same_on_batch p keepdim",
    "RandomClahe": "clip_limit grid_size slow_and_differentiable same_on_batch p keepdim",
    "RandomAutoContrast": "clip_output same_on_batch p keepdim",
    "RandomSharpness": "sharpness same_on_batch p keepdim",
    "RandomMixUpV2": "lambda_val same_on_batch p keepdim data_keys",
    "RandomCutMixV2": "num_mix cut_size beta same_on_batch p keepdim data_keys use_correct_lambda",
    "RandAugment": "n m policy transformation_matrix_mode",
    "TrivialAugment": "policy transformation_matrix_mode",
    "AutoAugment": "policy transformation_matrix_mode",
}
"""Every setting of the modules that are lowered, as they were when the ops were compared with them."""


@pytest.mark.parametrize("kind", [*kornia.LOWERED, *kornia.POLICIES], ids=lambda kind: kind.__name__)
def test_lowered_modules_have_no_unknown_settings(kind):
    """Replays use the settings that there were: one that is new would be left out without a word."""
    name, parameters = kind.__name__, list(inspect.signature(kind).parameters)
    assert KNOWN_PARAMETERS.get(name, "").split() == parameters, (
        f"put the constructor's parameters of {name} into KNOWN_PARAMETERS, after comparing each of them with the op"
    )
