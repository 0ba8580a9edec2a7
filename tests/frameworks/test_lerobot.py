"""A dataset of LeRobot's with two cameras: ``examples/robot_policy.py`` reads its frames, actions and tasks.

LeRobot asks for an older torch: pip install --no-deps lerobot draccus einops jsonlines mergedeep pyyaml-include termcolor
"""

import logging

import numpy as np
import pytest
import torch
from support.process.examples import run_example
from torch.utils.data import DataLoader

import gpuaug

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

CAMERAS = ["observation.images.top", "observation.images.wrist"]
EPISODES, MOMENTS = 2, 12


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A dataset whose frames and actions say which moment of which episode they are of."""
    pytest.importorskip("lerobot.datasets.lerobot_dataset", exc_type=ImportError)
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    logging.getLogger("libav").setLevel(logging.CRITICAL)
    root = tmp_path_factory.mktemp("lerobot") / "arm"
    camera = {"dtype": "video", "shape": (64, 96, 3), "names": ["height", "width", "channels"]}
    numbers = {"dtype": "float32", "shape": (2,), "names": ["x", "y"]}
    features = {**dict.fromkeys(CAMERAS, camera), "observation.state": numbers, "action": numbers}
    made = LeRobotDataset.create("me/arm", fps=10, features=features, root=root)
    for episode in range(EPISODES):
        for moment in range(MOMENTS):
            picture = np.full((64, 96, 3), grey(episode, moment), np.uint8)
            value = np.array([moment, episode], np.float32)
            frame = {CAMERAS[0]: picture, CAMERAS[1]: 255 - picture, "observation.state": value, "action": -value}
            made.add_frame({**frame, "task": f"task {episode}"})
        made.save_episode()
    made.finalize()
    return LeRobotDataset("me/arm", root=root)


def grey(episode, moment):
    return 20 + 9 * moment + 110 * episode


def test_frames_actions_and_tasks_are_those_of_the_moments(recorded):
    chunks = run_example("robot_policy", "--steps", 1, "--workers", 0)["Chunks"]
    data = chunks(recorded, {CAMERAS[0]: [-0.1, 0.0], CAMERAS[1]: [0.0, 0.3], "action": [0.0, 0.1, 0.2]})
    loader = DataLoader(data, 6, collate_fn=gpuaug.collate_encoded)
    index = 0
    for batch in gpuaug.StreamedLoader(loader, [gpuaug.DecodeStage()], device="cpu"):
        for row, task in enumerate(batch["task"]):
            episode, moment = divmod(index, MOMENTS)

            def inside(delta, moment=moment):
                return min(max(moment + delta, 0), MOMENTS - 1)

            tops, wrists = ([grey(episode, inside(delta)) for delta in deltas] for deltas in ((-1, 0), (0, 3)))
            for camera, wanted in ((CAMERAS[0], tops), (CAMERAS[1], [255 - each for each in wrists])):
                got = batch[camera][row].float().mean((1, 2, 3))
                assert torch.allclose(got, torch.tensor(wanted, dtype=torch.float32), atol=4), (camera, index)
            assert batch["action"][row, :, 0].tolist() == [-inside(delta) for delta in range(3)]
            assert batch["action_is_pad"][row].tolist() == [moment + delta >= MOMENTS for delta in range(3)]
            assert (task, batch["observation.state"][row].tolist()) == (f"task {episode}", [moment, episode])
            index += 1
    assert index == EPISODES * MOMENTS


def test_a_policy_trains_on_it(recorded, capsys):
    run_example("robot_policy", "--data", recorded.root, "--repo-id", "me/arm", "--steps", 2, "--workers", 0, "--batch-size", 4)
    assert "step 2: error" in capsys.readouterr().out
