"""Action recognition: trains on a random clip of each video, and averages five clips of three crops each to evaluate a video.

python examples/action_recognition.py                              # small videos that are made on the first run; a CPU will do
python examples/action_recognition.py --data /data/ucf101 --size 112 --frames 16 --stride 4 --batch-size 32 --epochs 30

A quarter of the videos is for the evaluation. Its batches are the clips of one video, so videos may have any size.
"""

import argparse
import random
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets.folder import DatasetFolder
from torchvision.transforms import v2

import gpuaug
from gpuaug.benchkit.videos import moving_textures

CLIPS, CROPS = 5, 3  # of each video in the evaluation


class Clips(Dataset):
    """A random clip of each video; or, for the evaluation, ``CLIPS`` evenly spaced ones one behind the other."""

    def __init__(self, samples, frames, stride, *, spaced=False):
        self.samples, self.choice, self.spaced = samples, {"frames": frames, "stride": stride, "short": "loop"}, spaced

    def __len__(self):
        return len(self.samples) * (CLIPS if self.spaced else 1)

    def __getitem__(self, index):
        video, number = divmod(index, CLIPS) if self.spaced else (index, None)
        path, label = self.samples[video]
        at = random.random() if number is None else number / (CLIPS - 1)
        return gpuaug.read_clip(path, at=at, **self.choice), label


class ThreeCrops(nn.Module):
    """The squares at both ends and in the middle of the long side: (3 · B, T, C, size, size), crop by crop."""

    def forward(self, clips):
        height, width = clips.shape[-2:]
        side = min(height, width)
        offsets = [round(number * (max(height, width) - side) / (CROPS - 1)) for number in range(CROPS)]
        tops_lefts = [(0, offset) if width >= height else (offset, 0) for offset in offsets]
        return torch.cat([clips[..., top : top + side, left : left + side] for top, left in tops_lefts])


class Network(nn.Module):
    """Convolutions over time and space: logits (B, classes) of clips (B, T, 3, H, W)."""

    def __init__(self, classes, width=12):
        super().__init__()
        sizes = [3, width, 2 * width, 4 * width]
        blocks = [
            nn.Sequential(nn.Conv3d(one, two, 3, stride=(1, 2, 2), padding=1), nn.BatchNorm3d(two), nn.ReLU())
            for one, two in pairwise(sizes)
        ]
        self.layers = nn.Sequential(*blocks, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(sizes[-1], classes))

    def forward(self, clips):
        return self.layers(clips.transpose(1, 2))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder of a folder of videos for each class (default: videos of moving textures)")
    parser.add_argument("--size", type=int, default=64, help="side of the crops in pixels (default: %(default)s)")
    parser.add_argument("--frames", type=int, default=8, help="of a clip (default: %(default)s)")
    parser.add_argument("--stride", type=int, default=1, help="from one frame to the next (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes that read files (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=5, help="(default: %(default)s)")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    device, half = torch.device("cuda" if gpu else "cpu"), torch.bfloat16 if gpu else torch.float32
    torch.manual_seed(0)

    files = DatasetFolder(args.data or moving_textures(), loader=None, extensions=(".mp4", ".webm", ".mkv", ".avi"))
    train = [sample for index, sample in enumerate(files.samples) if index % 4]
    held_out = files.samples[::4]
    last = [v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    crop = v2.Compose([v2.RandomResizedCrop(args.size, scale=(0.4, 1.0)), v2.RandomHorizontalFlip(), *last])
    reading = {"num_workers": args.workers, "collate_fn": gpuaug.collate_encoded}
    loader = DataLoader(
        Clips(train, args.frames, args.stride), args.batch_size, shuffle=True, drop_last=len(train) > args.batch_size, **reading
    )
    stages = [gpuaug.DecodeStage(), gpuaug.fuse(crop, ragged=True, dtype=half)]
    loader = gpuaug.StreamedLoader(loader, stages, device=device)
    clips_of_videos = DataLoader(Clips(held_out, args.frames, args.stride, spaced=True), CLIPS, **reading)
    resize = gpuaug.fuse(v2.Compose([v2.Resize(args.size), *last]), dtype=half)
    val_loader = gpuaug.StreamedLoader(clips_of_videos, [gpuaug.DecodeStage(), resize, ThreeCrops()], device=device)

    model = Network(len(files.classes)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(args.epochs):
        for clips, labels in loader:
            with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
                loss = F.cross_entropy(model(clips), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        right = torch.zeros((), device=device)
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=gpu):
            for clips, labels in val_loader:  # (CROPS · CLIPS, T, 3, size, size) of one video
                right += model(clips).float().softmax(1).mean(0).argmax() == labels[0]
        model.train()
        print(f"epoch {epoch}: loss {loss:.3f}, accuracy {right / len(held_out):.1%} of {len(held_out)} videos")


if __name__ == "__main__":
    main()
