"""Learn from photographs without labels: two views of each, drawn in the launches of one, and a contrastive loss (SimCLR).

python examples/two_views.py                                  # the photographs of scikit-image; a CPU will do
python examples/two_views.py --data /data/imagenet/train --size 224 --batch-size 256 --steps 100000

What it learns is in all layers but the last two, which a linear probe leaves out.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import gpuaug
from gpuaug.benchkit.photos import photographs


def contrastive_loss(projected, temperature=0.2):
    """Each view is to find the other view of its image among all views of the batch, (2 B, D), one view behind the other."""
    projected = F.normalize(projected.float(), dim=1)
    similarity = (projected @ projected.T / temperature).fill_diagonal_(-torch.inf)
    others = torch.arange(len(projected), device=projected.device).roll(len(projected) // 2)
    return F.cross_entropy(similarity, others)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder of class folders (default: the photographs of scikit-image)")
    parser.add_argument("--size", type=int, default=64, help="side of a view in pixels (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes that read files (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="(default: %(default)s)")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    torch.manual_seed(0)

    views = v2.Compose(
        [
            v2.RandomResizedCrop(args.size, scale=(0.2, 1.0)),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
            v2.RandomGrayscale(0.2),
            v2.GaussianBlur(args.size // 10 // 2 * 2 + 1, (0.1, 2.0)),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    augment = gpuaug.fuse(views, ragged=True, views=2, dtype=torch.bfloat16 if gpu else torch.float32)
    files = ImageFolder(args.data or photographs(), loader=gpuaug.read_encoded)
    reading = {"num_workers": args.workers, "collate_fn": gpuaug.collate_encoded}
    loader = DataLoader(files, args.batch_size, shuffle=True, drop_last=True, **reading)
    loader = gpuaug.StreamedLoader(loader, stages=[gpuaug.DecodeStage(), augment], device=device)

    model = models.resnet18(weights=None)
    model.fc = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 128))  # thrown away after this training
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    while step < args.steps:
        for images, _labels in loader:  # (2 B, 3, size, size)
            with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
                projected = model(images)
            loss = contrastive_loss(projected)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 5 == 0 or step == args.steps:
                print(f"step {step}: loss {loss:.3f}")
            if step == args.steps:
                break


if __name__ == "__main__":
    main()
