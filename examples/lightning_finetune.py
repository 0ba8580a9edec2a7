"""Fine-tuning under Lightning: train_dataloader returns a StreamedLoader, and the rest is Lightning as it always is.

    python examples/lightning_finetune.py                         # the photographs of scikit-image; a CPU will do
    python examples/lightning_finetune.py --data /data/flowers --pretrained --size 224 --batch-size 64 --epochs 10 --devices 2

Needs ``pip install lightning``.
"""

import argparse

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import gpuaug
from gpuaug.benchkit.photos import photographs


class Images(lightning.LightningDataModule):
    """Loaders that decode and augment on the device of this rank."""

    def __init__(self, args):
        super().__init__()
        self.args = args
        files = ImageFolder(args.data or photographs(), loader=gpuaug.read_encoded)
        self.classes = len(files.classes)
        self.train_files = Subset(files, [index for index in range(len(files)) if index % 4])
        self.val_files = Subset(files, range(0, len(files), 4))

    def streamed(self, files, sizing, *, shuffle):
        sampler = DistributedSampler(files, self.trainer.world_size, self.trainer.global_rank, shuffle=shuffle)
        reading = {"num_workers": self.args.workers, "collate_fn": gpuaug.collate_encoded}
        last = [v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
        stages = [gpuaug.DecodeStage(), gpuaug.fuse(v2.Compose([*sizing, *last]), ragged=True)]
        loader = DataLoader(files, self.args.batch_size, sampler=sampler, **reading)
        return gpuaug.StreamedLoader(loader, stages, device=self.trainer.strategy.root_device)

    def train_dataloader(self):
        return self.streamed(self.train_files, [v2.RandomResizedCrop(self.args.size), v2.RandomHorizontalFlip()], shuffle=True)

    def val_dataloader(self):
        side = self.args.size
        return self.streamed(self.val_files, [v2.Resize(side * 8 // 7), v2.CenterCrop(side)], shuffle=False)


class Finetuned(lightning.LightningModule):
    """A ResNet whose last layer is new, and learns ten times as fast as the others."""

    def __init__(self, classes, *, pretrained):
        super().__init__()
        self.net = models.resnet18(weights=models.ResNet18_Weights.DEFAULT if pretrained else None)
        self.net.fc = nn.Linear(self.net.fc.in_features, classes)

    def training_step(self, batch, _index):
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _index):
        images, labels = batch
        right = (self.net(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, prog_bar=True, sync_dist=True, batch_size=len(labels))

    def configure_optimizers(self):
        groups = [{"params": [value for name, value in self.net.named_parameters() if not name.startswith("fc.")]}]
        return torch.optim.AdamW([*groups, {"params": self.net.fc.parameters(), "lr": 1e-3}], lr=1e-4)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder of class folders (default: the photographs of scikit-image)")
    parser.add_argument("--pretrained", action="store_true", help="begin from torchvision's weights, which it downloads")
    parser.add_argument("--size", type=int, default=64, help="side of the crops in pixels (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="of each device (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes that read files (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--devices", type=int, default=1, help="(default: %(default)s)")
    args = parser.parse_args()
    lightning.seed_everything(0)
    images = Images(args)
    # The loaders have their sampler, and Lightning cannot put one into a StreamedLoader.
    own = {"use_distributed_sampler": False, "logger": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(max_epochs=args.epochs, devices=args.devices, **own)
    trainer.fit(Finetuned(images.classes, pretrained=args.pretrained), datamodule=images)
    print({name: round(value.item(), 3) for name, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
