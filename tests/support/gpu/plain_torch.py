"""Prints, as JSON, what a user reads about a fused pipeline on a GPU. Run as a program where Triton may lack what it needs."""

import json
import os
import sys
import warnings

import kornia.augmentation as K
import torch

import gpuaug
from gpuaug.benchkit import results, uses


def step(batch):
    batch.square().mean()


def main():
    device = torch.device("cuda")
    augment = gpuaug.fuse(K.AugmentationSequential(K.RandomResizedCrop((32, 32)), K.RandomHorizontalFlip()))
    batches = [torch.zeros(8, 3, 64, 64, dtype=torch.uint8)] * 9
    read = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", gpuaug.GpuAugWarning)
        try:
            augment(batches[0].to(device))
        except gpuaug.GpuAugError as error:
            read["error"] = f"{type(error).__name__}: {error}"
        else:
            report = gpuaug.profile(gpuaug.StreamedLoader(batches, [augment]), step, batches=8, rounds=1, show=False)
            read["verdict"] = report.verdict
    read["warnings"] = [str(each.message) for each in caught if issubclass(each.category, gpuaug.GpuAugWarning)]
    read["repr"] = repr(augment)
    read["explain"] = str(augment.explain()).splitlines()
    read["bench"] = list(uses.verdict([], device))
    read["result"] = results.result("uses", rows=[], settings={}, device=device)["environment"]["plain_torch"]
    read["cache"] = os.environ.get("TRITON_CACHE_DIR")
    sys.stdout.write(f"\n{json.dumps(read, indent=1)}\n")


if __name__ == "__main__":
    main()
