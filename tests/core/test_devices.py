"""Where the host waits for a GPU, and in whose code."""

import traceback
import warnings
from pathlib import Path

import pytest
import torch

import gpuaug
from gpuaug.core.devices import host_waits, user_line


def stack(*files):
    return [traceback.FrameSummary(str(name), line, "f", lookup_line=False) for line, name in enumerate(files, 1)]


TORCH, PACKAGE = Path(torch.__file__).parent, Path(gpuaug.__file__).parent


def test_place_is_the_users_innermost_code():
    frames = stack("/me/train.py", "/me/crop.py", TORCH / "_tensor.py", PACKAGE / "stages.py", warnings.__file__, "<frozen x>")
    assert user_line(frames) == "/me/crop.py:2"


def test_place_may_be_in_another_package():
    assert user_line(stack("/me/train.py", "/lib/kornia/geometry.py", TORCH / "_tensor.py")) == "/lib/kornia/geometry.py:2"


@pytest.mark.parametrize("package", [TORCH, PACKAGE])
def test_place_in_a_package_whose_name_begins_like_torchs(package):
    own = f"{package}_train.py"
    assert user_line(stack("/me/train.py", own)) == f"{own}:2"
    beside = package.with_name(f"{package.name}vision") / "ops.py"
    assert user_line(stack("/me/train.py", beside)) == f"{beside}:2"


def test_place_without_user_code_is_the_innermost():
    assert user_line(stack(TORCH / "a.py", PACKAGE / "b.py")) == f"{PACKAGE / 'b.py'}:2"


@pytest.fixture
def modes(monkeypatch):
    """The modes that were set, on a double of PyTorch's sync debug mode."""
    modes = [0]

    def set_mode(mode):
        modes.append(mode)
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    return modes


def step():
    for _ in range(2):
        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
    warnings.warn("another", stacklevel=2)


def test_waits_are_found_and_other_warnings_are_shown(modes):
    show, filters = warnings.showwarning, list(warnings.filters)
    with pytest.warns(UserWarning, match="another") as shown, host_waits() as lines:
        step()
    assert len(shown) == 1
    assert lines == [f"{__file__}:{step.__code__.co_firstlineno + 2}"] * 2
    assert modes == [0, "warn", 0]
    assert warnings.showwarning is show
    assert list(warnings.filters) == filters


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_mode_of_the_users_stays_and_an_interrupt_restores_it(modes):
    modes.append(2)

    def interrupted():
        with host_waits():
            torch.cuda.set_sync_debug_mode(1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert modes == [0, 2, 1, 2]
