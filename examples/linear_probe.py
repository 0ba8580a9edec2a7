"""A linear probe: the frozen DINOv2 is a stage, captured in a CUDA graph, and the loop trains on its class token.

    python examples/linear_probe.py                               # the photographs of scikit-image; a CPU will do
    python examples/linear_probe.py --cache features/ --epochs 20 # epochs 0 to 3 store the features, later epochs read them
    python examples/linear_probe.py --data /data/imagenet/train --dinov2 dinov2_vitb14 --size 224 --batch-size 256 --epochs 10

Without ``--dinov2`` the transformer is a small one with random weights that has DINOv2's method and results. Its features tell
textures apart all the same.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import gpuaug
from gpuaug.benchkit.photos import photographs


class Dino(nn.Module):
    """A vision transformer with ``forward_features`` as DINOv2 has it."""

    embed_dim = 192

    def __init__(self, size, patch=16, layers=4):
        super().__init__()
        self.patches = nn.Conv2d(3, self.embed_dim, patch, stride=patch)
        self.tokens = nn.Parameter(0.02 * torch.randn(1, 1 + (size // patch) ** 2, self.embed_dim))
        layer = nn.TransformerEncoderLayer(self.embed_dim, 3, 768, activation="gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(self.embed_dim)

    def forward_features(self, images):
        patches = self.patches(images).flatten(2).transpose(1, 2)
        states = self.norm(self.blocks(nn.functional.pad(patches, (0, 0, 1, 0)) + self.tokens))
        return {"x_norm_clstoken": states[:, 0], "x_norm_patchtokens": states[:, 1:]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder of class folders (default: the photographs of scikit-image)")
    parser.add_argument("--dinov2", help="name of a model in torch.hub's facebookresearch/dinov2, which it downloads")
    parser.add_argument("--size", type=int, default=64, help="side of the crops in pixels (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes that read files (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, help="stop after as many (default: at the end of the last epoch)")
    parser.add_argument("--cache", help="folder of a feature cache for the training images")
    parser.add_argument("--checkpoint", type=Path, help="file that is written at the end")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    torch.manual_seed(0)

    files = ImageFolder(args.data or photographs(), loader=gpuaug.read_encoded)
    train = Subset(files, [index for index in range(len(files)) if index % 4])
    val = Subset(files, range(0, len(files), 4))
    dino = torch.hub.load("facebookresearch/dinov2", args.dinov2) if args.dinov2 else Dino(args.size)
    dino = dino.to(device).requires_grad_(False)
    half = torch.bfloat16 if gpu else None
    cache = gpuaug.FeatureCache(args.cache, views=4) if args.cache else None
    last = [v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    crop = v2.Compose([v2.RandomResizedCrop(args.size, scale=(0.3, 1.0)), v2.RandomHorizontalFlip(), *last])
    middle = v2.Compose([v2.Resize(args.size * 8 // 7), v2.CenterCrop(args.size), *last])

    def streamed(part, pipeline, sampler=None, cache=None):
        reading = {"num_workers": args.workers, "collate_fn": gpuaug.collate_encoded}
        loader = DataLoader(cache.wrap(part) if cache else part, args.batch_size, sampler=sampler, **reading)
        features = gpuaug.FeatureStage(dino.forward_features, output="x_norm_clstoken", autocast=half, cache=cache)
        stages = [gpuaug.DecodeStage(), gpuaug.fuse(pipeline, ragged=True), features]
        return gpuaug.StreamedLoader(loader, stages, device=device)

    shuffled = DistributedSampler(train, 1, 0, seed=0)  # its order depends on the epoch alone
    loader, val_loader = streamed(train, crop, shuffled, cache), streamed(val, middle)
    head = nn.Sequential(nn.BatchNorm1d(dino.embed_dim, affine=False), nn.Linear(dino.embed_dim, len(files.classes))).to(device)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    step, first = 0, 0
    if args.resume:
        saved = torch.load(args.checkpoint, map_location=device, weights_only=True)
        step, first = saved["step"], saved["epoch"]
        head.load_state_dict(saved["head"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
    epoch = first
    for epoch in range(first, args.epochs):
        loader.set_epoch(epoch)
        for encoded, labels in loader:  # (B, width)
            loss = F.cross_entropy(head(encoded.float()), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == args.steps:
                break
        if step == args.steps:
            break
        head.eval()
        with torch.no_grad():
            right = sum((head(encoded.float()).argmax(1) == labels).sum() for encoded, labels in val_loader)
        head.train()
        print(f"epoch {epoch}: loss {loss:.3f}, accuracy {right / len(val):.1%}")
    if args.checkpoint:
        state = {"head": head.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
        torch.save({**state, "step": step, "epoch": epoch}, args.checkpoint)


if __name__ == "__main__":
    main()
