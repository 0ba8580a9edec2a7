"""Train a ResNet on a folder of images, one process a GPU; stop anywhere, and go on from there.

    python examples/train_imagefolder.py                        # the photographs of scikit-image, on this machine's GPU or CPU
    torchrun --nproc-per-node 8 examples/train_imagefolder.py --data /data/imagenet --epochs 90 --checkpoint run.pt --resume

``--data`` holds a folder for each class, or two such folders, ``train`` and ``val``. Where there are no two, every eighth image
is left for the evaluation. Without ``--data`` it needs ``pip install 'gpuaug[bench]'``, for the photographs.

How several GPUs compare with one, from the same files and with as much work for each:

    CUDA_VISIBLE_DEVICES=0   torchrun --nproc-per-node 1 examples/train_imagefolder.py --data DIR --steps 200 --json rates.json
    CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc-per-node 2 examples/train_imagefolder.py --data DIR --steps 200 --json rates.json
"""

import argparse
import json
import math
import os
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, Subset
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import gpuaug
from gpuaug.benchkit import results
from gpuaug.benchkit.environment import allowed_cores, environment
from gpuaug.benchkit.photos import photographs

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LOG_EVERY = 100  # steps
WINDOW = 10  # steps that a rate is measured over


def options(gpu):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, help="folder of class folders, or of train and val (default: the photographs of scikit-image)")
    add("--model", default="resnet50" if gpu else "resnet18", help="a classifier of torchvision (default: %(default)s)")
    add("--size", type=int, default=224 if gpu else 64, help="side of the crops in pixels (default: %(default)s)")
    add("--batch-size", type=int, default=256 if gpu else 16, help="images of a step, in each process (default: %(default)s)")
    add("--workers", type=int, default=4 if gpu else 1, help="processes that read files, for each rank (default: %(default)s)")
    add("--epochs", type=int, default=4, help="(default: %(default)s)")
    add("--lr", type=float, default=0.1, help="for 256 images a step, scaled to the number there are (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights, order and augmentations (default: %(default)s)")
    add("--bf16", action=argparse.BooleanOptionalAction, default=gpu, help="bfloat16 autocast (default: %(default)s)")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--checkpoint", type=Path, help="file to write after every epoch, and at the end")
    add("--checkpoint-every", type=int, default=1000, metavar="STEPS", help="and so often besides (default: %(default)s)")
    add("--resume", action="store_true", help="go on from the file of --checkpoint, if it is there")
    add("--repeat", type=int, default=1, help="read the folder so often in an epoch: for measurements on a small one")
    add("--steps", type=int, help="stop after this step, without an evaluation, and print the median rate")
    add("--json", type=Path, help="file to add that rate to, with the machine and the versions")
    args = parser.parse_args()
    if args.resume and args.checkpoint is None:
        parser.error("--resume needs --checkpoint, which says from where")
    return args


def datasets(args):
    """Encoded files to train on and to evaluate on, and the number of classes."""
    root = args.data or photographs()
    if (root / "train").is_dir() and (root / "val").is_dir():
        train, val = (ImageFolder(root / name, loader=gpuaug.read_encoded) for name in ("train", "val"))
        classes = len(train.classes)
    else:
        images = ImageFolder(root, loader=gpuaug.read_encoded)
        train = Subset(images, [index for index in range(len(images)) if index % 8])
        val = Subset(images, range(0, len(images), 8))
        classes = len(images.classes)
    return ConcatDataset([train] * args.repeat), val, classes


def loaders(args, train, val, device, rank, world):
    """The loaders of one rank: its part of every training epoch, and its part of the evaluation."""
    image = {"dtype": torch.bfloat16 if args.bf16 else torch.float32, "ragged": True}
    image["memory_format"] = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    last = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    augment = gpuaug.fuse(v2.Compose([v2.RandomResizedCrop(args.size), v2.RandomHorizontalFlip(), *last]), **image)
    middle = gpuaug.fuse(v2.Compose([v2.Resize(args.size * 8 // 7), v2.CenterCrop(args.size), *last]), **image)

    reading = {"batch_size": args.batch_size, "num_workers": args.workers, "collate_fn": gpuaug.collate_encoded}
    sampler = DistributedSampler(train, world, rank, seed=args.seed, drop_last=True)
    train_files = DataLoader(train, sampler=sampler, drop_last=True, persistent_workers=args.workers > 0, **reading)
    # A DistributedSampler would repeat images until every rank has as many, and the evaluation would count those twice.
    val_files = DataLoader(Subset(val, range(rank, len(val), world)), **reading)
    # Ranks draw differently: a StreamedLoader takes its rank from torch.distributed.
    return (
        gpuaug.StreamedLoader(train_files, [gpuaug.DecodeStage(), augment], device=device),
        gpuaug.StreamedLoader(val_files, [gpuaug.DecodeStage(), middle], device=device),
    )


class Training:
    """A model on its way: what a checkpoint holds, and what is done to it."""

    def __init__(self, args, net, device, loader, val_loader):
        self.args, self.net, self.device, self.loader, self.val_loader = args, net, device, loader, val_loader
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
        # With find_unused_parameters=True sums of gradients keep one order, and three ranks or more resume bit for bit as well.
        model = DistributedDataParallel(net) if dist.is_initialized() else net
        self.model = torch.compile(model) if args.compile else model
        self.step = self.epoch = 0
        self.times = []

    def run(self):
        """Train for the epochs, or up to the step, that were asked for."""
        self.times.append(perf_counter())
        for epoch in range(self.epoch, self.args.epochs):
            self.loader.set_epoch(epoch)  # also the sampler's
            for images, labels in self.loader:
                loss = self.train_step(images, labels)
                self.times.append(perf_counter())
                if self.step % LOG_EVERY == 0 and self.rank == 0:
                    print(f"epoch {epoch}, step {self.step}: loss {loss:.3f}")  # which waits for the GPU
                if self.args.steps is not None and self.step >= self.args.steps:
                    self.save()
                    return
                if self.step % self.args.checkpoint_every == 0:
                    self.save()
            if self.args.steps is None:
                accuracy, rate = self.evaluate(), self.rate()
                if self.rank == 0:
                    print(f"epoch {epoch}, step {self.step}: accuracy {accuracy:.1%}, {rate:,.0f} images/s a rank")
            self.epoch = epoch + 1
            self.save()

    def train_step(self, images, labels):
        """One step. Nothing in it makes the host wait for the GPU."""
        done = self.step / (self.args.epochs * len(self.loader))
        images_a_step = self.args.batch_size * self.world
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.lr * images_a_step / 256 * min(1, done * 20, (1 + math.cos(math.pi * done)) / 2)
        with self.autocast():
            loss = F.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.detach()

    @torch.no_grad()
    def evaluate(self):
        """Share of images that are classified correctly. Ranks may have different numbers of batches."""
        if dist.is_initialized():
            for buffer in self.net.buffers():  # a rank's running means are its own until the next step
                dist.broadcast(buffer, 0)
        counts = torch.zeros(2, device=self.device)
        self.net.eval()
        for images, labels in self.val_loader:
            with self.autocast():
                correct = self.net(images).argmax(1) == labels  # not of DistributedDataParallel, which would wait for all ranks
            counts[0] += correct.sum()
            counts[1] += len(labels)
        self.net.train()
        if dist.is_initialized():
            dist.all_reduce(counts)
        return (counts[0] / counts[1]).item()

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.bf16)

    def save(self):
        """Write what the rest of the run depends on: the one model and optimizer, and the state of each rank's loader."""
        if self.args.checkpoint is None:
            return
        state = {"step": self.step, "epoch": self.epoch, "loaders": of_all_ranks(self.loader.state_dict())}
        if self.rank == 0:
            state |= {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
            partial = self.args.checkpoint.with_suffix(".partial")
            torch.save(state, partial)
            partial.replace(self.args.checkpoint)  # a run that ends here leaves the old file or the new one

    def resume(self):
        """Go on from the file of the last :meth:`save`."""
        state = torch.load(self.args.checkpoint, map_location="cpu", weights_only=True)
        self.step, self.epoch = state["step"], state["epoch"]
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.loader.load_state_dict(state["loaders"][self.rank % len(state["loaders"])])  # refused if ranks are not as many

    def rate(self):
        """Median images a second of this rank. The first quarter is left out: compilation, workers that start, cold caches."""
        times = self.times[len(self.times) // 4 :]
        window = min(WINDOW, len(times) - 1)
        rates = [window / (end - begin) for begin, end in zip(times, times[window:], strict=False)] if window else [0.0]
        return median(rates) * self.args.batch_size


def of_all_ranks(value):
    """What each rank has, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def add_rates(args, rates, settings, device, machine):
    """Put the rates of this number of ranks into a file of results, beside those of other numbers."""
    name = f"{len(rates)} rank{'s' * (len(rates) > 1)}"
    row = {"name": name, "case": args.model, "batch_size": args.batch_size}
    row |= {"images_per_s": sum(rates), "images_per_s_of_ranks": rates}
    rows = json.loads(args.json.read_text())["rows"] if args.json.exists() else []
    rows = [each for each in rows if each["name"] != name] + [row]
    rows.sort(key=lambda each: len(each["images_per_s_of_ranks"]))
    settings |= {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
    results.write(args.json, results.result("scaling", rows=rows, settings=settings, device=device, environment=machine))


def main():
    gpu = torch.cuda.is_available()
    args = options(gpu)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:  # leave the workers cores of their own: a step waits for whichever of its threads comes last
        torch.set_num_threads(max(1, min(torch.get_num_threads(), allowed_cores() - args.workers)))
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    machine = environment(device) if rank == 0 else None  # before the measurement, which would show in the clocks and the load

    torch.manual_seed(args.seed)  # the same weights, and the same seed of draws, in all ranks
    train, val, classes = datasets(args)
    net = models.get_model(args.model, weights=None, num_classes=classes)
    net = net.to(device, memory_format=torch.channels_last if gpu else torch.contiguous_format)
    loader, val_loader = loaders(args, train, val, device, rank, world)
    with loader:
        training = Training(args, net, device, loader, val_loader)
        if args.resume and args.checkpoint.exists():
            training.resume()
        training.run()

    rates = of_all_ranks(training.rate())
    if rank == 0:
        each = ", ".join(f"{rate:,.0f}" for rate in rates)
        print(f"{sum(rates):,.0f} images/s in {world} processes ({each}), median of windows of {WINDOW} steps")
        if args.json is not None:
            add_rates(args, rates, {"images": len(train), "classes": classes}, device, machine)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
