"""The training program: its exact resume, its evaluation, and its rates, with one process, two, and two nodes."""

import json
import re
import runpy
from argparse import Namespace

import pytest
import torch
from support.process.examples import EXAMPLES, differences, finished, free_port, run_example, started, torchrun

from bench.harness.result_check import check_result
from gpuaug.benchkit import results

SCRIPT = EXAMPLES / "train_imagefolder.py"
# Of 24 images three are evaluated, and the others are three steps an epoch.
SMALL = ["--model", "shufflenet_v2_x0_5", "--size", 32, "--batch-size", 7, "--epochs", 2, "--workers", 0]


def small(folder, **settings):
    given = [argument for name, value in settings.items() for argument in (f"--{name}", value)]
    return ["--data", folder, *SMALL, *given]


def assert_equal(one, two):
    assert differences(torch.load(one, weights_only=True), torch.load(two, weights_only=True)) == []


def test_run_that_is_resumed_equals_an_uninterrupted_one(class_folder, tmp_path):
    whole, stopped = tmp_path / "whole.pt", tmp_path / "stopped.pt"
    run_example("train_imagefolder", *small(class_folder, checkpoint=whole))
    run_example("train_imagefolder", *small(class_folder, checkpoint=stopped, steps=3))  # at the end of the first epoch
    run_example("train_imagefolder", *small(class_folder, checkpoint=stopped, steps=4), "--resume")  # in the second
    assert differences(torch.load(whole), torch.load(stopped)), "nothing was left to do"
    run_example("train_imagefolder", *small(class_folder, checkpoint=stopped), "--resume")
    assert_equal(whole, stopped)


def test_evaluation_and_rate_are_printed_and_written(class_folder, tmp_path, capsys):
    run_example("train_imagefolder", *small(class_folder))
    printed = capsys.readouterr().out
    found = re.findall(r"^epoch (\d), step (\d): accuracy (\d+)\.", printed, re.MULTILINE)
    assert [(epoch, step) for epoch, step, _ in found] == [("0", "3"), ("1", "6")]
    assert {int(accuracy) for *_, accuracy in found} <= {0, 33, 66, 100}, "three images are evaluated"
    file = tmp_path / "scaling.json"
    run_example("train_imagefolder", *small(class_folder, steps=2, json=file))
    assert "accuracy" not in capsys.readouterr().out
    found = json.loads(file.read_text())
    check_result(found)
    (row,) = found["rows"]
    assert (row["name"], row["images_per_s_of_ranks"]) == ("1 rank", [row["images_per_s"]])
    results.write(file, found | {"rows": [row | {"name": "2 ranks", "images_per_s_of_ranks": [1.0, 1.0]}]})
    run_example("train_imagefolder", *small(class_folder, steps=2, json=file))
    assert [row["name"] for row in json.loads(file.read_text())["rows"]] == ["1 rank", "2 ranks"]
    assert str(class_folder) not in str(found["settings"]), "a result does not tell where images lie"


def test_ranks_have_parts_of_their_own(class_folder):
    program = runpy.run_path(str(SCRIPT))
    args = Namespace(data=class_folder, size=32, batch_size=2, workers=0, seed=0, bf16=False, repeat=1)
    train, val, classes = program["datasets"](args)
    assert (len(train), len(val), classes) == (21, 3, 2)
    made = [program["loaders"](args, train, val, torch.device("cpu"), rank, 2) for rank in (0, 1)]
    seen = [[int(index) for index in val_loader.dataset.indices] for _, val_loader in made]
    assert seen == [[0, 2], [1]], "each image once, without one that is repeated"
    assert [sum(len(labels) for _, labels in val_loader) for _, val_loader in made] == [2, 1]
    orders = [list(loader.sampler) for loader, _ in made]
    assert not set(orders[0]) & set(orders[1])
    assert [len(list(loader)) for loader, _ in made] == [5, 5], "ranks make steps together"


def test_resume_needs_a_checkpoint(class_folder, capsys):
    with pytest.raises(SystemExit):
        run_example("train_imagefolder", *small(class_folder), "--resume")
    assert "--resume needs --checkpoint" in capsys.readouterr().err


def launch(ranks):
    """What starts the program with so many ranks."""
    return [] if ranks == 1 else torchrun("--nproc-per-node", ranks, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_new_process_resumes_bit_for_bit(class_folder, tmp_path, ranks):
    whole, stopped = tmp_path / "whole.pt", tmp_path / "stopped.pt"
    run = [*launch(ranks), SCRIPT, *small(class_folder, **{"batch-size": 4, "workers": 1})]
    finished(started([*run, "--checkpoint", whole]))
    finished(started([*run, "--checkpoint", stopped, "--steps", 3]))
    finished(started([*run, "--checkpoint", stopped, "--resume"]))
    assert_equal(whole, stopped)
    assert len(torch.load(whole)["loaders"]) == ranks


@pytest.mark.slow
def test_two_nodes_on_two_addresses_train_one_model(class_folder, tmp_path):
    port, nodes = free_port(), []
    for node, address in enumerate(["127.0.0.1", "127.0.0.2"]):
        own = ["--nnodes", 2, "--node-rank", node, "--local-addr", address]
        options = [*own, "--master-addr", "127.0.0.1", "--master-port", port]
        saved = ["--checkpoint", tmp_path / "run.pt", "--json", tmp_path / "scaling.json"]
        nodes.append(started([*torchrun(*options), SCRIPT, *small(class_folder), *saved]))
    printed = finished(*nodes)
    assert [text.count("epoch 1") for text in printed] == [1, 0], "the first rank of all speaks"
    (row,) = json.loads((tmp_path / "scaling.json").read_text())["rows"]
    assert len(row["images_per_s_of_ranks"]) == 2
    assert [state["source"]["rank"] for state in torch.load(tmp_path / "run.pt")["loaders"]] == [0, 1]
