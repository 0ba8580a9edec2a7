"""A linear probe: the frozen vision transformer is a stage, captured in a CUDA graph, and the loop trains on its features.

    python examples/linear_probe.py                               # the photographs of scikit-image; a CPU will do
    python examples/linear_probe.py --data /data/imagenet/train --pretrained --size 224 --batch-size 256 --epochs 10

Without ``--pretrained`` the transformer is a small one with random weights, whose features tell textures apart all the same.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import gpuaug
from gpuaug.benchkit.photos import photographs


def encoder_for(args):
    """A transformer without its classifier, and the number of its features."""
    if args.pretrained:
        encoder = models.vit_b_16(weights=models.ViT_B_16_Weights.DEFAULT)
    else:
        width = {"hidden_dim": 192, "mlp_dim": 768}
        encoder = models.VisionTransformer(image_size=args.size, patch_size=16, num_layers=4, num_heads=3, **width)
    encoder.heads = nn.Identity()
    return encoder.requires_grad_(False), encoder.hidden_dim


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder of class folders (default: the photographs of scikit-image)")
    parser.add_argument("--pretrained", action="store_true", help="ViT-B/16 with torchvision's weights, which it downloads")
    parser.add_argument("--size", type=int, default=64, help="side of the crops in pixels (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes that read files (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=5, help="(default: %(default)s)")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    torch.manual_seed(0)

    files = ImageFolder(args.data or photographs(), loader=gpuaug.read_encoded)
    train = Subset(files, [index for index in range(len(files)) if index % 4])
    val = Subset(files, range(0, len(files), 4))
    encoder, width = encoder_for(args)
    features = gpuaug.FeatureStage(encoder.to(device), autocast=torch.bfloat16 if gpu else None)
    last = [v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    crop = v2.Compose([v2.RandomResizedCrop(args.size, scale=(0.3, 1.0)), v2.RandomHorizontalFlip(), *last])
    middle = v2.Compose([v2.Resize(args.size * 8 // 7), v2.CenterCrop(args.size), *last])

    def streamed(part, pipeline, *, shuffle):
        reading = {"num_workers": args.workers, "collate_fn": gpuaug.collate_encoded}
        loader = DataLoader(part, args.batch_size, shuffle=shuffle, **reading)
        stages = [gpuaug.DecodeStage(), gpuaug.fuse(pipeline, ragged=True), features]
        return gpuaug.StreamedLoader(loader, stages, device=device)

    loader, val_loader = streamed(train, crop, shuffle=True), streamed(val, middle, shuffle=False)
    head = nn.Sequential(nn.BatchNorm1d(width, affine=False), nn.Linear(width, len(files.classes))).to(device)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for epoch in range(args.epochs):
        for encoded, labels in loader:  # (B, width)
            loss = F.cross_entropy(head(encoded.float()), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        head.eval()
        with torch.no_grad():
            right = sum((head(encoded.float()).argmax(1) == labels).sum() for encoded, labels in val_loader)
        head.train()
        print(f"epoch {epoch}: loss {loss:.3f}, accuracy {right / len(val):.1%}")


if __name__ == "__main__":
    main()
