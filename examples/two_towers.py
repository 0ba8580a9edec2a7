"""Align two frozen towers by a small head each, with CLIP's loss: a tower is a stage, and both run side by side.

python examples/two_towers.py                       # the photographs of scikit-image; a CPU will do
python examples/two_towers.py --data photographs/ --clip openai/clip-vit-base-patch32 --size 224 --batch-size 256 --steps 1000

A caption is the name of the photograph's folder. Without ``--clip`` the towers are small ones with random weights, and the same
methods as those of ``transformers.CLIPModel``.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import gpuaug
from gpuaug.benchkit.photos import photographs

LENGTH, WORDS = 16, 256  # a caption is this many bytes


class Towers(nn.Module):
    """Towers for images and texts with methods as ``transformers.CLIPModel`` has them."""

    def __init__(self, size, width=64):
        super().__init__()
        self.patches = nn.Conv2d(3, width, size // 4, stride=size // 4)
        self.tokens = nn.Embedding(WORDS, width)
        self.image_layer, self.text_layer = (
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True) for _ in range(2)
        )

    def get_image_features(self, pixel_values):
        return {"pooler_output": self.image_layer(self.patches(pixel_values).flatten(2).transpose(1, 2)).mean(1)}

    def get_text_features(self, input_ids, attention_mask):
        states = self.text_layer(self.tokens(input_ids), src_key_padding_mask=attention_mask == 0)
        return {"pooler_output": states[:, 0]}


class Captioned(torch.utils.data.Dataset):
    """Encoded photographs, with the bytes of their captions."""

    def __init__(self, root):
        self.files = ImageFolder(root, loader=gpuaug.read_encoded)
        texts = [list(name.encode())[:LENGTH] for name in self.files.classes]
        self.ids = torch.tensor([text + [0] * (LENGTH - len(text)) for text in texts])

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        image, label = self.files[index]
        return {"image": image, "ids": self.ids[label], "mask": (self.ids[label] > 0).long()}


class Heads(nn.Module):
    """A head for each tower, and the scale of their similarities."""

    def __init__(self, image_width, text_width, width=32):
        super().__init__()
        self.image, self.text = nn.Linear(image_width, width), nn.Linear(text_width, width)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images, texts):
        images, texts = F.normalize(self.image(images), dim=1), F.normalize(self.text(texts), dim=1)
        logits = self.scale.exp() * images @ texts.T  # (B, B)
        found = torch.arange(len(images), device=images.device)
        return (F.cross_entropy(logits, found) + F.cross_entropy(logits.T, found)) / 2


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder of class folders (default: the photographs of scikit-image)")
    parser.add_argument("--clip", help="name or folder of a transformers.CLIPModel, which is downloaded")
    parser.add_argument("--size", type=int, default=64, help="side of the crops in pixels (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes that read files (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="(default: %(default)s)")
    parser.add_argument("--checkpoint", type=Path, help="file that is written at the end")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    torch.manual_seed(0)

    towers = Towers(args.size)
    if args.clip:
        from transformers import CLIPModel

        towers = CLIPModel.from_pretrained(args.clip)
    towers = towers.to(device).requires_grad_(False)
    half = {"output": "pooler_output", "autocast": torch.bfloat16 if gpu else None}
    texts = {"ids": "input_ids", "mask": "attention_mask"}
    crop = [v2.RandomResizedCrop(args.size, scale=(0.5, 1.0)), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]
    crop += [v2.Normalize((0.481, 0.458, 0.408), (0.269, 0.261, 0.276))]
    stages = [
        gpuaug.DecodeStage(on="image"),
        gpuaug.TransformStage(gpuaug.fuse(v2.Compose(crop), ragged=True), on="image"),
        gpuaug.FeatureStage(towers.get_image_features, on={"image": "pixel_values"}, into="image", name="images", **half),
        gpuaug.FeatureStage(towers.get_text_features, on=texts, into="text", name="texts", **half),
    ]
    photos = Captioned(args.data or photographs())
    sampler = DistributedSampler(photos, 1, 0, seed=0)  # its order depends on the epoch alone
    reading = {"num_workers": args.workers, "collate_fn": gpuaug.collate_encoded, "drop_last": True}
    loader = gpuaug.StreamedLoader(DataLoader(photos, args.batch_size, sampler=sampler, **reading), stages, device=device)

    width = towers.config.projection_dim if args.clip else 64
    heads = Heads(width, width).to(device)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=1e-3)
    step, epoch, loss = 0, 0, torch.zeros(())
    if args.resume:
        saved = torch.load(args.checkpoint, map_location=device, weights_only=True)
        step, epoch = saved["step"], saved["epoch"]
        heads.load_state_dict(saved["heads"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
    while step < args.steps:
        loader.set_epoch(epoch)
        for batch in loader:
            loss = heads(batch["image"].float(), batch["text"].float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == args.steps:
                break
        else:
            epoch += 1
    print(f"step {step}: loss {loss:.3f}")
    if args.checkpoint:
        state = {"heads": heads.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
        torch.save({**state, "step": step, "epoch": epoch}, args.checkpoint)


if __name__ == "__main__":
    main()
