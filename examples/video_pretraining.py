"""VideoMAE-style pre-training: a small transformer sees a tenth of a clip's patches and predicts the pixels of the others.

python examples/video_pretraining.py                # small videos that are made on the first run; a CPU will do
python examples/video_pretraining.py --data /data/kinetics --size 224 --batch-size 32 --frames 16 --stride 4 --steps 100000

The sampler draws where in its video each clip begins, so a resumed run reads the same clips. The crop, the flip and the mask
are drawn by stages, which resume by themselves.
"""

import argparse
import random
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision.datasets.folder import DatasetFolder
from torchvision.transforms import v2

import gpuaug
from gpuaug.benchkit.videos import moving_textures

TUBE, PATCH = 2, 16  # frames and pixels of a patch
HIDDEN = 0.9  # share of the patches that are masked


class Clips(Dataset):
    """Clips of videos, by (number of the video, position of the clip in it)."""

    def __init__(self, paths, frames, stride):
        self.paths, self.frames, self.stride = paths, frames, stride

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, drawn):
        index, at = drawn
        return (gpuaug.read_clip(self.paths[index], frames=self.frames, stride=self.stride, at=at, short="loop"),)


class RandomClips(Sampler):
    """Every video once in an epoch, at a random position, as the epoch alone decides."""

    def __init__(self, videos):
        self.videos, self.epoch = videos, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.videos

    def __iter__(self):
        draw = random.Random(self.epoch)
        for index in draw.sample(range(self.videos), self.videos):
            yield index, draw.random()


class TubeMask(nn.Module):
    """Hides the same patches of the picture in all frames: (B, patches of a frame), true where hidden."""

    def forward(self, clips):
        per_frame = (clips.shape[-2] // PATCH) * (clips.shape[-1] // PATCH)
        order = torch.rand(len(clips), per_frame, device=clips.device).argsort(1)
        return order < round(HIDDEN * per_frame)


def tubes(clips):
    """The pixels of each patch: (B, T / 2, patches of a frame, values)."""
    patches = clips.unflatten(1, (-1, TUBE)).unflatten(4, (-1, PATCH)).unflatten(6, (-1, PATCH))  # B T t C H h W w
    return patches.permute(0, 1, 4, 6, 2, 5, 7, 3).flatten(4).flatten(2, 3)


class MaskedAutoencoder(nn.Module):
    """Predicts hidden patches from the others."""

    def __init__(self, size, frames, width=96):
        super().__init__()
        values, self.per_frame = 3 * TUBE * PATCH**2, (size // PATCH) ** 2
        self.into, self.out = nn.Linear(values, width), nn.Linear(width, values)
        self.positions = nn.Parameter(0.02 * torch.randn(frames // TUBE * self.per_frame, width))
        self.hidden = nn.Parameter(torch.zeros(width))
        self.encoder, self.decoder = (
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(width, 3, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True),
                layers,
                enable_nested_tensor=False,
            )
            for layers in (3, 1)
        )

    def forward(self, clips, mask):
        """The mean squared error of the hidden patches, each patch normalised by its own mean and deviation."""
        patches = tubes(clips)
        mask = mask[:, None].expand(patches.shape[:3]).flatten(1)
        patches = patches.flatten(1, 2)
        positions = self.positions.expand(len(clips), -1, -1)
        seen = (self.into(patches) + positions)[~mask].unflatten(0, (len(clips), -1))  # as many of each clip
        states = torch.where(mask[..., None], self.hidden + positions, 0)
        states[~mask] = self.encoder(seen).flatten(0, 1).to(states.dtype)
        with torch.no_grad():
            wanted = (patches - patches.mean(-1, keepdim=True)) / (patches.std(-1, keepdim=True) + 1e-3)
        return F.mse_loss(self.out(self.decoder(states))[mask], wanted[mask])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder of folders of videos (default: small videos of moving textures)")
    parser.add_argument("--size", type=int, default=64, help="side of the crops in pixels (default: %(default)s)")
    parser.add_argument("--frames", type=int, default=8, help="of a clip (default: %(default)s)")
    parser.add_argument("--stride", type=int, default=2, help="from one frame to the next (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes that read files (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="(default: %(default)s)")
    parser.add_argument("--checkpoint", type=Path, help="file that is written at the end")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    device, half = torch.device("cuda" if gpu else "cpu"), torch.bfloat16 if gpu else torch.float32
    torch.manual_seed(0)

    files = DatasetFolder(args.data or moving_textures(), loader=None, extensions=(".mp4", ".webm", ".mkv", ".avi"))
    data = Clips([path for path, _ in files.samples], args.frames, args.stride)
    pipeline = [
        v2.RandomResizedCrop(args.size, scale=(0.66**2, 1.0), ratio=(0.75, 1.33)),  # multi-scale: sides of 66 to 100 %
        v2.RandomHorizontalFlip(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
    stages = [
        gpuaug.DecodeStage(),
        gpuaug.fuse(v2.Compose(pipeline), ragged=True, dtype=half),  # of videos of every size
        gpuaug.TransformStage(TubeMask(), into=1, name="mask"),
    ]
    reading = {"num_workers": args.workers, "collate_fn": gpuaug.collate_encoded, "drop_last": True}
    loader = DataLoader(data, args.batch_size, sampler=RandomClips(len(data)), **reading)
    loader = gpuaug.StreamedLoader(loader, stages, device=device)

    model = MaskedAutoencoder(args.size, args.frames).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    step, epoch, loss = 0, 0, torch.zeros(())
    if args.resume:
        saved = torch.load(args.checkpoint, map_location=device, weights_only=True)
        step, epoch = saved["step"], saved["epoch"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
    while step < args.steps:
        loader.set_epoch(epoch)
        for clips, mask in loader:  # (B, T, 3, size, size), (B, patches of a frame)
            with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
                loss = model(clips, mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0 or step == args.steps:
                print(f"step {step}: loss {loss:.3f}")
            if step == args.steps:
                break
        else:
            epoch += 1
    if args.checkpoint:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
        torch.save({**state, "step": step, "epoch": epoch}, args.checkpoint)


if __name__ == "__main__":
    main()
