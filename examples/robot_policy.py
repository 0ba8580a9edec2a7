"""Imitation of a robot's recordings: frames of two cameras, the state and the task give the next actions.

python examples/robot_policy.py                                              # recordings that it makes; a CPU will do
python examples/robot_policy.py --data /data/pusht --repo-id lerobot/pusht   # a dataset of LeRobot's (pip install lerobot)

``Chunks`` reads what ``LeRobotDataset(…, delta_timestamps=…)`` reads, but leaves frames undecoded. The light is the same for
all cameras of a sample, so one stage has them all, with one draw. Each camera is mounted by itself, so its crop has a stage of
its own, with a draw of its own.
"""

import argparse
import math
import tempfile
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

import gpuaug
from gpuaug.benchkit.videos import encode

SEEN = (-0.1, 0.0)  # seconds from now: of frames
CHUNK = (0.0, 0.1, 0.2, 0.3)  # of actions


class Chunks(Dataset):
    """Samples around each moment of a ``LeRobotDataset``, also of selected episodes.

    ``delta_timestamps`` are times in seconds from the moment, by the name of the feature. A time before or after the episode
    gives its first or last moment, and is true in ``"<feature>_is_pad"``.
    """

    def __init__(self, dataset, delta_timestamps):
        self.meta, self.rows, self.deltas = dataset.meta, dataset.hf_dataset, delta_timestamps

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        number, now = int(row["episode_index"]), int(row["index"])  # numbers in the whole dataset, not in the selection
        episode = self.meta.episodes[number]
        first, last = episode["dataset_from_index"], episode["dataset_to_index"] - 1
        sample = {name: value for name, value in row.items() if name not in self.deltas}
        sample["task"] = self.meta.tasks.index[int(row["task_index"])]
        for feature, deltas in self.deltas.items():
            wanted = [now + round(delta * self.meta.fps) for delta in deltas]
            moments = [min(max(each, first), last) for each in wanted]
            sample[f"{feature}_is_pad"] = torch.tensor([one != other for one, other in zip(wanted, moments, strict=True)])
            if feature in self.meta.video_keys:  # episodes may lie one behind the other in a file
                begin = episode[f"videos/{feature}/from_timestamp"]
                path = self.meta.root / self.meta.get_video_file_path(number, feature)
                times_s = [begin + (each - first) / self.meta.fps for each in moments]
                sample[feature] = gpuaug.read_clip(path, times_s=times_s)
            else:
                sample[feature] = torch.stack([self.rows[index + each - now][feature] for each in moments])
        return sample


def recordings(root, episodes=4, moments=24, height=64, width=96):
    """As much of a ``LeRobotDataset`` as ``Chunks`` reads: a point that circles, seen from above and along the table."""
    tasks = ["circle to the left", "circle to the right"]
    keys = ["observation.images.top", "observation.images.side"]
    rows, about = [], []
    for number in range(episodes):
        angles = [2 * math.pi * time / moments + number for time in range(moments + 1)]
        points = [(math.cos(angle), (1, -1)[number % 2] * math.sin(angle)) for angle in angles]
        pictures = {key: [np.full((height, width, 3), 60 + 10 * number, np.uint8) for _ in points[1:]] for key in keys}
        for time, (now, after) in enumerate(pairwise(points)):
            x, y = round((0.5 + 0.35 * now[0]) * width), round((0.5 + 0.35 * now[1]) * height)
            pictures[keys[0]][time][y - 4 : y + 4, x - 4 : x + 4] = (250, 200, 20)
            pictures[keys[1]][time][height // 2 :, x - 4 : x + 4] = (20, 200, 250)
            action = torch.tensor(after) - torch.tensor(now)
            row = {"episode_index": number, "index": number * moments + time, "task_index": number % 2}
            rows.append({**row, "observation.state": torch.tensor(now), "action": action})
        for key in keys:
            encode(root / f"{key}-{number}.mp4", pictures[key], rate=10)
        start = {f"videos/{key}/from_timestamp": 0.0 for key in keys}
        about.append({"dataset_from_index": number * moments, "dataset_to_index": (number + 1) * moments, **start})
    meta = SimpleNamespace(root=root, fps=10, episodes=about, video_keys=keys, tasks=SimpleNamespace(index=tasks))
    meta.get_video_file_path = lambda number, key: f"{key}-{number}.mp4"
    return SimpleNamespace(meta=meta, hf_dataset=rows)


class Policy(nn.Module):
    """Actions (B, chunk, numbers) from the cameras' frames, the state and the number of the task."""

    def __init__(self, cameras, tasks, state, action, width=32):
        super().__init__()
        self.cameras, self.shape = cameras, (len(CHUNK), action)
        convolutions = [nn.Conv2d(3, width // 2, 5, 3), nn.ReLU(), nn.Conv2d(width // 2, width, 3, 2), nn.ReLU()]
        self.look = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.LazyLinear(width))
        self.task = nn.Embedding(tasks, width)
        inputs = len(cameras) * len(SEEN) * width + state + width
        self.act = nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, math.prod(self.shape)))

    def forward(self, batch, tasks):
        seen = [self.look(batch[camera].flatten(0, 1)).unflatten(0, (-1, len(SEEN))).flatten(1) for camera in self.cameras]
        return self.act(torch.cat([*seen, batch["observation.state"], self.task(tasks)], 1)).unflatten(1, self.shape)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of a dataset of LeRobot's (default: recordings that are made here)")
    parser.add_argument("--repo-id", help="the dataset's name, with --data or to be downloaded")
    parser.add_argument("--size", type=int, default=56, help="side of the crops in pixels (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes that read files (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="(default: %(default)s)")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    torch.manual_seed(0)

    with tempfile.TemporaryDirectory() as folder:
        if args.repo_id:
            from lerobot.datasets.lerobot_dataset import LeRobotDataset

            dataset = LeRobotDataset(args.repo_id, root=args.data)
        else:
            dataset = recordings(Path(folder))
        train(args, dataset, device)


def train(args, dataset, device):
    cameras, names = list(dataset.meta.video_keys), list(dataset.meta.tasks.index)
    data = Chunks(dataset, {**dict.fromkeys(cameras, SEEN), "action": CHUNK})
    light = gpuaug.fuse(v2.Compose([v2.ColorJitter(0.3, 0.3, 0.3)]), dtype=torch.uint8)
    last = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
    crop = gpuaug.fuse(v2.Compose([v2.RandomCrop(args.size), *last]))
    stages = [
        gpuaug.DecodeStage(),
        gpuaug.TransformStage(light, on=dict.fromkeys(cameras, "input"), name="light"),  # one draw for all cameras
        *(gpuaug.TransformStage(crop, on=camera, name=f"crop {camera}") for camera in cameras),  # a draw for each
    ]
    reading = {"num_workers": args.workers, "collate_fn": gpuaug.collate_encoded}
    loader = DataLoader(data, args.batch_size, shuffle=True, drop_last=True, **reading)
    loader = gpuaug.StreamedLoader(loader, stages, device=device)

    first = data[0]
    policy = Policy(cameras, len(names), len(first["observation.state"]), first["action"].shape[-1]).to(device)
    optimizer = None
    step = 0
    while step < args.steps:
        for batch in loader:  # (B, 2, 3, size, size) of each camera, (B, chunk, numbers) of actions, and a list of texts
            tasks = torch.tensor([names.index(task) for task in batch["task"]], device=device)
            errors = (policy(batch, tasks) - batch["action"]).abs().mean(2)
            loss = errors[~batch["action_is_pad"]].mean()
            optimizer = optimizer or torch.optim.AdamW(policy.parameters(), lr=1e-3)  # the first batch gives lazy layers a size
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 20 == 0 or step == args.steps:
                print(f"step {step}: error {loss:.3f}")
            if step == args.steps:
                break


if __name__ == "__main__":
    main()
