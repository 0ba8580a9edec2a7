"""Which versions of Kornia modules are lowered of, and what is said of others."""

import inspect
import re
from importlib.metadata import version

import kornia.augmentation as K
import pytest
from kornia.augmentation import auto
from support.comparison.replay import photographs
from support.ops.op_cases import CASES
from torch import nn

import gpuaug
from gpuaug.fusion.lower import kornia


@pytest.fixture
def another_kornia(monkeypatch):
    kornia.warn_of_untested_version.cache_clear()
    monkeypatch.setattr(kornia, "version", lambda name: "1.3.0rc1")
    yield
    kornia.warn_of_untested_version.cache_clear()


UNTESTED = "Kornia 1.3.0rc1 is not one of the tested versions (kornia>=0.9,<0.10)"
INSTALL = 'Run pip install "kornia>=0.9,<0.10".'


def test_unknown_kornia_version_is_warned_of_once_in_a_process(another_kornia):
    text = re.escape(f"No module of Kornia is fused, because {UNTESTED}")
    with pytest.warns(gpuaug.GpuAugWarning, match=text) as caught:
        augment = gpuaug.fuse([K.RandomHorizontalFlip(), K.RandomInvert()])
    assert len(caught) == 1
    gpuaug.fuse([auto.RandAugment(2, 10), nn.Identity()])
    assert augment(photographs()).shape == (3, 3, 32, 48)
    assert UNTESTED in str(augment.explain())


def test_ragged_true_is_refused_with_an_unknown_kornia_version(another_kornia):
    with pytest.raises(gpuaug.ArgumentError, match=f"tested version for ragged=True, .* {re.escape(INSTALL)}"):
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
        "of it has all modules left to Kornia. Widen TESTED_VERSIONS in gpuaug/fusion/lower/kornia.py, run tests/fusion, make "
        "the ops agree, and update docs/fuse.md."
    )


KNOWN_PARAMETERS = {
    **{kind.__name__: case.parameters for kind, case in CASES.items()},
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
        f"put the constructor's parameters of {name} into its Case in tests/support/ops/op_cases.py, after comparing each of "
        "them with the op"
    )
