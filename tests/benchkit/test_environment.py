import json
import subprocess

import pytest
import torch

import gpuaug
from gpuaug.benchkit.environment import allowed_cores, environment


def test_says_what_a_figure_needs_and_is_plain_json():
    said = environment(torch.device("cpu"))
    assert json.loads(json.dumps(said, allow_nan=False)) == said
    assert said["versions"]["torch"] == torch.__version__
    assert said["versions"]["kornia"]
    assert said["gpu"] is None
    assert said["cpu"]["cores_allowed"] == allowed_cores() >= 1
    assert said["time_utc"].endswith("+00:00")


def _git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_commit_and_dirty_flag_are_those_of_the_checkout(tmp_path, monkeypatch):
    package = tmp_path / "gpuaug"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setattr(gpuaug, "__file__", str(package / "__init__.py"))
    assert environment(torch.device("cpu"))["commit"] is None, "not a checkout"
    _git(tmp_path, "init")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-m", "first")
    said = environment(torch.device("cpu"))
    assert len(said["commit"]) == 40
    assert said["dirty"] is False
    (package / "new.py").touch()
    assert environment(torch.device("cpu"))["dirty"] is True


def test_an_installation_inside_another_checkout_does_not_take_its_commit(tmp_path, monkeypatch):
    package = tmp_path / "venv" / "gpuaug"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    _git(tmp_path, "init")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-m", "somebody else's")
    monkeypatch.setattr(gpuaug, "__file__", str(package / "__init__.py"))
    said = environment(torch.device("cpu"))
    assert (said["commit"], said["dirty"]) == (None, None)


def test_a_missing_program_is_tolerated(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert environment(torch.device("cpu"))["commit"] is None


@pytest.mark.gpu
def test_the_real_card_is_described():
    gpu = environment(torch.device("cuda"))["gpu"]
    assert gpu["name"] == torch.cuda.get_device_name()
    assert gpu["memory_bytes"] > 0
