"""Detection with torchvision's Faster R-CNN: boxes follow their images through a crop, a flip and a jitter on the device.

    python examples/detection.py                                  # the photographs of scikit-image; a CPU will do

Without annotated images at hand, one photograph is pasted onto another, and its place is the box that is to be found.
"""

import argparse
import random

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn
from torchvision.transforms import v2

import gpuaug
from gpuaug.benchkit.photos import photographs


class Pasted(Dataset):
    """Photographs of all sizes with another one pasted onto each, decoded by the dataset."""

    def __init__(self, root):
        self.paths = [path for path, _ in ImageFolder(root).samples]

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        draw = random.Random(index)
        with Image.open(self.paths[index]) as file:
            image = file.convert("RGB")
        with Image.open(draw.choice(self.paths)) as file:
            pasted = file.convert("RGB").resize((image.width // 3, image.height // 3))
        left, top = draw.randint(0, image.width - pasted.width), draw.randint(0, image.height - pasted.height)
        image.paste(pasted, (left, top))
        boxes = torch.tensor([[left, top, left + pasted.width, top + pasted.height]], dtype=torch.float32)
        return {"image": image, "target": {"boxes": boxes, "labels": torch.tensor([1])}}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder of class folders (default: the photographs of scikit-image)")
    parser.add_argument("--size", type=int, default=128, help="side of the crops in pixels (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes that decode (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="(default: %(default)s)")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)

    train = v2.Compose(
        [
            v2.RandomResizedCrop(args.size, scale=(0.4, 1.0)),
            v2.RandomHorizontalFlip(),
            v2.RandomPhotometricDistort(),
            v2.ToDtype(torch.float32, scale=True),
            v2.SanitizeBoundingBoxes(min_size=8),
        ]
    )
    augment = gpuaug.TransformStage(gpuaug.fuse(train, ragged=True), on={"image": "input", "target": "targets"})
    dataset = Pasted(args.data or photographs())
    loader = DataLoader(
        dataset, args.batch_size, shuffle=True, drop_last=True, num_workers=args.workers, collate_fn=gpuaug.collate_ragged
    )
    drop_cut_off = gpuaug.TransformStage(gpuaug.sanitize, on="target")  # boxes that the crop has cut off
    loader = gpuaug.StreamedLoader(loader, stages=[augment, drop_cut_off], device=device)

    sides = {"min_size": args.size, "max_size": args.size}
    model = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=2, **sides).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step = 0
    while step < args.steps:
        for batch in loader:
            losses = model(list(batch["image"]), batch["target"])
            loss = sum(losses.values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 2 == 0 or step == args.steps:
                print(f"step {step}: " + ", ".join(f"{name} {value:.3f}" for name, value in losses.items()))
            if step == args.steps:
                break


if __name__ == "__main__":
    main()
