"""Segmentation: masks follow their photographs through crops and flips, each at its own size until it is cut.

    python examples/segmentation.py                               # the photographs of scikit-image; a CPU will do

Without annotated images at hand, a mask says which pixels are dark, grey and bright, so that there is something to learn.
"""

import argparse

import torch
from PIL import Image
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.models.segmentation import lraspp_mobilenet_v3_large
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as T

import gpuaug
from gpuaug.benchkit.photos import photographs

CLASSES = 3


class Masked(Dataset):
    """Encoded photographs, and their masks as tensors."""

    def __init__(self, root):
        self.paths = [path for path, _ in ImageFolder(root).samples]

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        with Image.open(self.paths[index]) as file:  # yours: the file of the mask
            grey = T.pil_to_tensor(file.convert("L"))  # (1, H, W)
        mask = grey // 86  # 0, 1 or 2
        return {"image": gpuaug.read_encoded(self.paths[index]), "target": {"masks": mask}}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder of class folders (default: the photographs of scikit-image)")
    parser.add_argument("--size", type=int, default=96, help="side of the crops in pixels (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes that read files (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="(default: %(default)s)")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)

    train = v2.Compose(
        [
            v2.RandomResizedCrop(args.size, scale=(0.3, 1.0)),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    augment = gpuaug.TransformStage(gpuaug.fuse(train, ragged=True), on={"image": "input", "target": "targets"})
    loader = DataLoader(
        Masked(args.data or photographs()),
        args.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=args.workers,
        collate_fn=gpuaug.collate_encoded,
    )
    loader = gpuaug.StreamedLoader(loader, stages=[gpuaug.DecodeStage(), augment], device=device)

    model = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=CLASSES).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    while step < args.steps:
        for batch in loader:
            masks = torch.cat([target["masks"] for target in batch["target"]]).long()  # (B, size, size)
            scores = model(batch["image"])["out"]
            loss = F.cross_entropy(scores, masks)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0 or step == args.steps:
                right = (scores.argmax(1) == masks).float().mean()
                print(f"step {step}: loss {loss:.3f}, {right:.0%} of pixels")
            if step == args.steps:
                break


if __name__ == "__main__":
    main()
