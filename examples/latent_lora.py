"""Fine-tune a denoiser by LoRA on latents: the VAE and the text encoder are stages, side by side.

python examples/latent_lora.py                      # the photographs of scikit-image; a CPU will do
python examples/latent_lora.py --cache latents/     # epochs 0 to 3 store the latents' distributions, later epochs read them
python examples/latent_lora.py --data photographs/ --side 256 --batch-size 8 --steps 10000 --checkpoint run.pt --resume
python examples/latent_lora.py --diffusers          # AutoencoderKL and CLIPTextModel in place of the small classes here

Photographs come in two buckets, wide and tall, and a batch is of one. A caption is the name of the photograph's folder, dropped
now and then. Crops, flips, dropped captions and latents are drawn anew in each epoch, and a resumed run draws the same ones.
With a cache, crops and flips repeat after four epochs; latents and dropped captions do not.
"""

import argparse
from pathlib import Path
from types import SimpleNamespace

import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import gpuaug
from gpuaug.benchkit.photos import photographs

LENGTH, WORDS = 16, 256  # a caption is this many bytes


class Vae(nn.Module):
    """As ``diffusers.AutoencoderKL``, as far as a trainer uses it."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 16, 4, stride=4), nn.SiLU(), nn.Conv2d(16, 8, 2, stride=2))

    def encode(self, images):
        return SimpleNamespace(latent_dist=SimpleNamespace(parameters=self.down(images)))


class TextEncoder(nn.Module):
    """As ``transformers.CLIPTextModel``, as far as a trainer uses it."""

    def __init__(self, width=32):
        super().__init__()
        self.tokens = nn.Embedding(WORDS, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True)

    def forward(self, input_ids, attention_mask):
        states = self.layer(self.tokens(input_ids), src_key_padding_mask=attention_mask == 0)
        return {"last_hidden_state": states}


def encoders(args):
    """A VAE and a text encoder with random weights."""
    if not args.diffusers:
        return Vae(), TextEncoder()
    from diffusers import AutoencoderKL
    from transformers import CLIPTextConfig, CLIPTextModel

    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    vae = AutoencoderKL(**blocks, block_out_channels=(8, 16, 16, 16), norm_num_groups=4, layers_per_block=1)
    width = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = CLIPTextConfig(**width, vocab_size=WORDS, max_position_embeddings=LENGTH, eos_token_id=1)
    return vae, CLIPTextModel(text)


class Lora(nn.Module):
    """A frozen linear layer, and what is learnt beside it."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Denoiser(nn.Module):
    """Predicts the noise in latents (B, 4, H, W) at ``times`` (B,) from a caption's states (B, N, width)."""

    def __init__(self, width=32):
        super().__init__()
        self.into = nn.Conv2d(4, width, 3, padding=1).requires_grad_(False)
        self.query, self.key, self.value = (Lora(nn.Linear(width, width)) for _ in range(3))
        self.out = nn.Conv2d(width, 4, 3, padding=1).requires_grad_(False)

    def forward(self, latents, times, states):
        features = self.into(latents) + times[:, None, None, None]
        pixels = features.flatten(2).transpose(1, 2)
        seen = F.scaled_dot_product_attention(self.query(pixels), self.key(states), self.value(states))
        return self.out(features + seen.transpose(1, 2).reshape(features.shape))


class Photographs(torch.utils.data.Dataset):
    """Photographs as they are in their files, with the bytes of their captions."""

    def __init__(self, root):
        self.files = ImageFolder(root, loader=gpuaug.read_encoded)
        sizes = [Image.open(path).size for path, _ in self.files.samples]
        self.wide = [width >= height for width, height in sizes]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        image, label = self.files[index]
        text = list(self.files.classes[label].encode())[:LENGTH]
        ids = torch.tensor(text + [0] * (LENGTH - len(text)))
        return {"pixels": image, "ids": ids, "mask": (ids > 0).long()}


class Buckets(torch.utils.data.Sampler):
    """Batches of one bucket, in an order that the seed and the epoch decide."""

    def __init__(self, wide, batch_size, seed):
        self.wide, self.batch_size, self.seed, self.epoch = torch.tensor(wide), batch_size, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return sum(-(-int((self.wide == wide).sum()) // self.batch_size) for wide in (True, False))

    def __iter__(self):
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        batches = []
        for wide in (True, False):
            (indices,) = torch.where(self.wide == wide)
            batches += indices[torch.randperm(len(indices), generator=draw)].split(self.batch_size)
        return iter([batches[index].tolist() for index in torch.randperm(len(batches), generator=draw)])


class Crop(nn.Module):
    """Crops each image of a batch to the size of its bucket, and scales it to [-1, 1]."""

    def __init__(self, sizes):
        super().__init__()
        last = [v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
        self.by_bucket = {}
        for wide, (height, width) in sizes.items():
            crop = v2.RandomResizedCrop((height, width), scale=(0.8, 1), ratio=(width / height, width / height))
            self.by_bucket[wide] = gpuaug.fuse(v2.Compose([crop, *last]), ragged=True)

    def forward(self, images):
        height, width = images[0].shape[-2:]
        return self.by_bucket[width >= height](images)


def drop_captions(ids):
    """One caption in ten becomes an empty one."""
    return torch.where(torch.rand(len(ids), 1, device=ids.device) < 0.1, 0, ids)


def sampled(moments):
    """A sample of the latents' distribution (B, 8, H, W), from mean and log variance."""
    mean, logvar = moments.float().chunk(2, dim=1)
    return (mean + (logvar.clamp(-30, 20) / 2).exp() * torch.randn_like(mean)) * 0.18215


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder of class folders (default: the photographs of scikit-image)")
    parser.add_argument("--side", "--size", type=int, default=64, help="longer side in pixels (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes that read files (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="(default: %(default)s)")
    parser.add_argument("--diffusers", action="store_true", help="classes of diffusers and transformers")
    parser.add_argument("--cache", help="folder of a feature cache")
    parser.add_argument("--checkpoint", type=Path, help="file that is written at the end")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    torch.manual_seed(0)

    photos = Photographs(args.data or photographs())
    sizes = {True: (args.side * 3 // 4, args.side), False: (args.side, args.side * 3 // 4)}
    cache = gpuaug.FeatureCache(args.cache, views=4) if args.cache else None
    buckets = Buckets(photos.wide, args.batch_size, seed=0)
    vae, text = (module.to(device).requires_grad_(False) for module in encoders(args))
    half = torch.bfloat16 if gpu else None
    moments = gpuaug.FeatureStage(
        vae.encode, on="pixels", into="moments", output="latent_dist.parameters", autocast=half, cache=cache, name="vae"
    )
    latents = gpuaug.TransformStage(sampled, on="moments", into="latents", name="latents")
    states = gpuaug.FeatureStage(
        text,
        on={"ids": "input_ids", "mask": "attention_mask"},
        into="states",
        output="last_hidden_state",
        autocast=half,
        name="text",
    )
    moments.capture([(args.batch_size, 3, *size) for size in sizes.values()])
    decode = gpuaug.DecodeStage(on="pixels")
    crop = gpuaug.TransformStage(Crop(sizes), on="pixels", name="crop")
    drop = gpuaug.TransformStage(drop_captions, on="ids", name="drop")
    dataset = cache.wrap(photos) if cache else photos
    loader = DataLoader(dataset, batch_sampler=buckets, num_workers=args.workers, collate_fn=gpuaug.collate_encoded)
    loader = gpuaug.StreamedLoader(loader, [decode, crop, moments, latents, drop, states], device=device)

    denoiser = Denoiser().to(device)
    learnt = [parameter for parameter in denoiser.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=1e-3)
    noise = torch.Generator(device).manual_seed(1)
    step, epoch, loss = 0, 0, torch.zeros(())
    if args.resume:
        saved = torch.load(args.checkpoint, map_location=device, weights_only=True)
        step, epoch = saved["step"], saved["epoch"]
        denoiser.load_state_dict(saved["denoiser"])
        optimizer.load_state_dict(saved["optimizer"])
        noise.set_state(saved["noise"].cpu())
        loader.load_state_dict(saved["loader"])
    while step < args.steps:
        loader.set_epoch(epoch)
        for batch in loader:
            clean = batch["latents"]  # (B, 4, H / 8, W / 8)
            added = torch.randn(clean.shape, generator=noise, device=device)
            times = torch.rand(len(clean), generator=noise, device=device)
            kept = times[:, None, None, None]
            loss = F.mse_loss(denoiser((1 - kept) * clean + kept * added, times, batch["states"].float()), added)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == args.steps:
                break
        else:
            epoch += 1
    stats = loader.stats()
    print(f"step {step}: loss {loss:.3f}; {stats.replayed} batches from {stats.captured} graphs, {stats.eager} eager")
    if cache:
        print(f"{stats.rows_encoded} latents encoded, {stats.rows_read} read from the cache")
    if args.checkpoint:
        state = {"denoiser": denoiser.state_dict(), "optimizer": optimizer.state_dict(), "noise": noise.get_state()}
        torch.save({**state, "loader": loader.state_dict(), "step": step, "epoch": epoch}, args.checkpoint)


if __name__ == "__main__":
    main()
