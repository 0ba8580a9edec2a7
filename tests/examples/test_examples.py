"""Each example runs on small images or videos without a GPU, on its own, and says what it has learnt."""

import ast
import re

import pytest
import torch
from support.process.examples import EXAMPLES, differences, run_example

STEPS = ["--steps", 2, "--size", 32, "--batch-size", 2]
EPOCHS = ["--epochs", 1, "--size", 32, "--batch-size", 6]
ARGUMENTS = {
    "action_recognition": [*EPOCHS, "--frames", 4],
    "detection": ["--steps", 1, "--size", 64, "--batch-size", 2],
    "latent_lora": STEPS,
    "lightning_finetune": EPOCHS,
    "linear_probe": EPOCHS,
    "multi_crop": STEPS,
    "robot_policy": STEPS,
    "segmentation": STEPS,
    "train_imagefolder": ["--model", "shufflenet_v2_x0_5", *EPOCHS],
    "two_towers": STEPS,
    "two_views": STEPS,
    "video_pretraining": STEPS,
}
"""What makes each a matter of a second."""


@pytest.fixture
def data(name, request):
    """Arguments that name small files of the kind that an example reads."""
    if name == "robot_policy":
        return []
    videos = name in ("action_recognition", "video_pretraining")
    return ["--data", request.getfixturevalue("video_folder" if videos else "class_folder")]


def test_every_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(ARGUMENTS)


RESUMED = {"latent_lora": [], "linear_probe": ["--epochs", 3], "two_towers": [], "video_pretraining": ["--frames", 4]}
"""Examples with a checkpoint, and their other arguments."""


def assert_has_learnt(printed):
    assert re.search(r"\d\.\d", printed), printed
    assert "nan" not in printed


@pytest.mark.parametrize("name", sorted(ARGUMENTS.keys() - RESUMED.keys() - {"train_imagefolder"}))
def test_example_runs_on_small_files(name, data, capsys):
    """Examples with a checkpoint run below, and train_imagefolder in a file of its own."""
    run_example(name, *data, "--workers", 0, *ARGUMENTS[name])
    assert_has_learnt(capsys.readouterr().out)


@pytest.mark.parametrize("name", RESUMED)
def test_run_that_is_resumed_equals_an_uninterrupted_one(name, data, tmp_path, capsys):
    small = [*data, "--workers", 0, "--size", 32, "--batch-size", 5, *RESUMED[name]]
    whole, stopped = ["--checkpoint", tmp_path / "whole.pt"], ["--checkpoint", tmp_path / "stopped.pt"]
    run_example(name, *small, *whole, "--steps", 6)
    assert_has_learnt(capsys.readouterr().out)
    run_example(name, *small, *stopped, "--steps", 5)  # in the second epoch
    assert differences(*(torch.load(path) for _, path in (whole, stopped))), "nothing was left to do"
    run_example(name, *small, *stopped, "--steps", 6, "--resume")
    assert differences(*(torch.load(path) for _, path in (whole, stopped))) == []


@pytest.mark.parametrize("name", ["latent_lora", "linear_probe"])
def test_run_that_reads_features_of_an_earlier_run_equals_it(name, data, tmp_path, capsys):
    small = [*data, "--workers", 0, "--size", 32, "--batch-size", 5, *RESUMED[name], "--steps", 6]
    for checkpoint in ("recorded.pt", "read.pt"):
        run_example(name, *small, "--cache", tmp_path / "features", "--checkpoint", tmp_path / checkpoint)
        assert_has_learnt(capsys.readouterr().out)
    run_example(name, *small, "--checkpoint", tmp_path / "plain.pt")
    states = [torch.load(tmp_path / name) for name in ("recorded.pt", "read.pt", "plain.pt")]
    for state in states:
        state["loader"].pop("replaced", None)  # how many samples were decoded, which samples with features are not
    assert differences(states[0], states[1]) == differences(states[0], states[2]) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ARGUMENTS)
def test_example_runs_on_photographs_as_it_is(name, capsys):
    run_example(name)
    assert re.search(r"\d\.\d", capsys.readouterr().out)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_example_uses_public_names_and_can_be_read_alone(name):
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    ours = {module for module in modules if module.partition(".")[0] in {"gpuaug", "bench", "support", "examples", *ARGUMENTS}}
    assert {".".join(module.split(".")[:2]) for module in ours} <= {"gpuaug", "gpuaug.benchkit"}
