"""Pipelines on a CPU need no Triton, whose functions are compiled from the formulas that torch runs."""

from support.process import processes

SCRIPT = """
import sys

assert "triton" not in sys.modules, "the import of gpuaug is without it"
sys.modules["triton"] = None  # an import of it raises an error

import kornia.augmentation as K
import torch

import gpuaug

modules = [
    K.RandomResizedCrop((12, 14)),
    K.ColorJitter(0.4, 0.4, 0.4, 0.1),
    *(kind(p=1.0) for kind in (K.RandomSolarize, K.RandomHue, K.RandomChannelDropout, K.RandomChannelShuffle)),
    *(kind(p=1.0) for kind in (K.RandomErasing, K.RandomGaussianNoise, K.RandomGrayscale)),
    K.Normalize(0.5, 0.25),
    K.Denormalize(0.5, 0.25),
]
augment = gpuaug.fuse(modules)
assert augment(torch.rand(2, 3, 16, 16)).isfinite().all()
assert augment.explain().launches == 2, "fused"
assert sys.modules["triton"] is None
"""


def test_pipelines_run_on_a_cpu_without_triton():
    done = processes.run_script(SCRIPT)
    assert done.returncode == 0, done.stderr
