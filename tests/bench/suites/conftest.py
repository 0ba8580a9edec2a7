import importlib
from dataclasses import replace

import pytest

from bench.harness import call_rows, measurement
from bench.suites.augmentation import accuracy
from bench.suites.training import priorities


@pytest.fixture(autouse=True)
def no_warm_up(monkeypatch):
    """Measure suites from their first step, since nobody reads the figures of a smoke run."""
    interleave = measurement.interleave

    def interleave_at_once(variants, **options):
        return interleave([replace(variant, discard=0) for variant in variants], **options, warmup=0)

    for module in (measurement, priorities):
        monkeypatch.setattr(module, "interleave", interleave_at_once)


@pytest.fixture(autouse=True)
def few_calls(monkeypatch):
    """Time three calls per row, for the same reason."""
    monkeypatch.setattr(call_rows, "_MAX_SECONDS", 0)


@pytest.fixture(autouse=True)
def small_runs(monkeypatch):
    """Profile two batches per window, draw two, and train a smaller model, for the same reason."""
    profile = importlib.import_module("gpuaug.profiler.profile")  # the package has a function of this name
    monkeypatch.setattr(profile, "MIN_WINDOW_BATCHES", 2)
    monkeypatch.setattr(profile, "TIMELINE_BATCHES", 2)
    monkeypatch.setattr(accuracy.models, "resnet18", accuracy.models.squeezenet1_1)
