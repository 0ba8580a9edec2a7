"""Self-distillation with DINO's multi-crop: two large views of each photograph for the teacher, and six small ones besides.

python examples/multi_crop.py                                 # the photographs of scikit-image; a CPU will do
python examples/multi_crop.py --data /data/imagenet/train --size 224 --batch-size 64 --steps 100000

A teacher and a student of one kind; the teacher's weights follow the student's, and are never trained.
"""

import argparse
import copy

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import gpuaug
from gpuaug.benchkit.photos import photographs

LARGE, SMALL = 2, 6  # views of each image
MOMENTUM = 0.99  # of the teacher's weights


def crops(size, scale, views, dtype):
    """Views of one kind: (views · B, 3, size, size), one view of the batch behind the other."""
    pipeline = [
        v2.RandomResizedCrop(size, scale=scale),
        v2.RandomHorizontalFlip(),
        v2.ColorJitter(0.4, 0.4, 0.2, 0.1),
        v2.RandomGrayscale(0.2),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
    return gpuaug.fuse(v2.Compose(pipeline), ragged=True, views=views, dtype=dtype)


def distillation_loss(student, teacher, center):
    """Each view of the student's is to predict what the teacher says of the other large views of the image."""
    targets = ((teacher.float() - center) / 0.04).softmax(1).chunk(LARGE)
    predicted = (student.float() / 0.1).log_softmax(1).chunk(LARGE + SMALL)
    pairs = [(target, view) for i, target in enumerate(targets) for j, view in enumerate(predicted) if i != j]
    return torch.stack([-(target * view).sum(1).mean() for target, view in pairs]).mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder of class folders (default: the photographs of scikit-image)")
    parser.add_argument("--size", type=int, default=64, help="side of a large view in pixels (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes that read files (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=15, help="(default: %(default)s)")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if gpu else "cpu"), torch.bfloat16 if gpu else torch.float32
    torch.manual_seed(0)

    stages = [
        gpuaug.DecodeStage(),  # once; both kinds of views are cut from the same pixels
        gpuaug.TransformStage(crops(args.size, (0.4, 1.0), LARGE, dtype), into=2, name="large"),
        gpuaug.TransformStage(crops(args.size * 3 // 7, (0.05, 0.4), SMALL, dtype), into=3, name="small"),
    ]
    files = ImageFolder(args.data or photographs(), loader=gpuaug.read_encoded)
    reading = {"num_workers": args.workers, "collate_fn": gpuaug.collate_encoded}
    loader = DataLoader(files, args.batch_size, shuffle=True, drop_last=True, **reading)
    loader = gpuaug.StreamedLoader(loader, stages, device=device)

    student = models.resnet18(weights=None)
    student.fc = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 256))
    teacher = copy.deepcopy(student).requires_grad_(False).to(device)
    student.to(device)
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-4)
    center = torch.zeros(256, device=device)
    step = 0
    while step < args.steps:
        for _images, _labels, large, small in loader:
            with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
                taught = teacher(large)
                learnt = torch.cat([student(large), student(small)])
            loss = distillation_loss(learnt, taught, center)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            center.lerp_(taught.float().mean(0), 0.1)
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast.detach(), 1 - MOMENTUM)
            step += 1
            if step % 5 == 0 or step == args.steps:
                print(f"step {step}: loss {loss:.3f}")
            if step == args.steps:
                break


if __name__ == "__main__":
    main()
