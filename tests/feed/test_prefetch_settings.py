"""Settings of the consumer's thread, with which the background thread reads the loader."""

import decimal
from contextlib import contextmanager

import pytest
import torch
from support.feed.feed_iterators import drained, feeding

from gpuaug import StreamedLoader


def settings():
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "context variable": decimal.getcontext().prec,
        "made": (torch.empty(1).device, torch.ones(1).is_inference()),
    }


@contextmanager
def more_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def global_default_device():
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


SETTINGS = {
    "as they were": lambda: torch.enable_grad(),
    "no grad": lambda: torch.no_grad(),
    "inference": lambda: torch.inference_mode(),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to half": lambda: torch.autocast("cpu", torch.float16),
    "default device": lambda: torch.device("meta"),
    "global default device": global_default_device,
    "threads": more_threads,
    "context variable": lambda: decimal.localcontext(prec=7),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_loader_and_stage_see_consumers_settings(setting):
    def loader():
        yield settings()

    def as_usual():
        return [item.batch for item in drained(feeding(loader()))[:-1]]

    outside = as_usual()
    with setting():
        expected = settings()
        assert as_usual() == [expected]
        assert list(StreamedLoader([0], [lambda _: settings()], device="cpu")) == [expected]
    assert as_usual() == outside


def test_settings_changed_in_loader_do_not_reach_consumer():
    before = settings()

    def loader():
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        yield 0

    drained(feeding(loader()))
    assert settings() == before
