"""Each example runs on photographs without a GPU, on its own, and says what it has learnt."""

import ast
import re

import pytest
from support.process.examples import EXAMPLES, run_example

STEPS = ["--steps", 2, "--size", 32, "--batch-size", 3]
EPOCHS = ["--epochs", 1, "--size", 32, "--batch-size", 6]
ARGUMENTS = {
    "detection": ["--steps", 1, "--size", 64, "--batch-size", 2],
    "lightning_finetune": EPOCHS,
    "linear_probe": EPOCHS,
    "multi_crop": STEPS,
    "segmentation": STEPS,
    "train_imagefolder": ["--model", "shufflenet_v2_x0_5", *EPOCHS],
    "two_views": STEPS,
}
"""What makes each a matter of a second."""


def test_every_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(ARGUMENTS)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_example_runs_on_small_images(name, class_folder, capsys):
    if name == "lightning_finetune":
        pytest.importorskip("lightning")
    run_example(name, "--data", class_folder, "--workers", 0, *ARGUMENTS[name])
    printed = capsys.readouterr().out
    assert re.search(r"\d\.\d", printed), printed
    assert "nan" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("name", ARGUMENTS)
def test_example_runs_on_photographs_as_it_is(name, capsys):
    if name == "lightning_finetune":
        pytest.importorskip("lightning")
    run_example(name)
    assert re.search(r"\d\.\d", capsys.readouterr().out)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_example_uses_public_names_and_can_be_read_alone(name):
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    ours = {module for module in modules if module.partition(".")[0] in {"gpuaug", "bench", "support", "examples", *ARGUMENTS}}
    assert {".".join(module.split(".")[:2]) for module in ours} <= {"gpuaug", "gpuaug.benchkit"}
