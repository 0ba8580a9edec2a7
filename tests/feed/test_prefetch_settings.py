"""Settings of the consumer's thread, with which the background thread reads the loader."""

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
        "made": (torch.empty(1).device, torch.ones(1).is_inference()),
    }


SETTINGS = {
    "as they were": lambda: torch.enable_grad(),
    "no grad": lambda: torch.no_grad(),
    "inference": lambda: torch.inference_mode(),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to half": lambda: torch.autocast("cpu", torch.float16),
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_loader_sees_consumers_grad_autocast_and_device_settings(setting):
    def loader():
        yield settings()

    with setting():
        expected = settings()
        (item, _) = drained(feeding(loader()))
    assert item.batch == expected


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_stage_sees_consumers_grad_autocast_and_device_settings(setting):
    with setting():
        expected = settings()
        (seen,) = StreamedLoader([0], [lambda _: settings()], device="cpu")
    assert seen == expected


def test_loader_sees_global_default_device():
    def loader():
        yield torch.empty(1).device.type

    torch.set_default_device("meta")
    try:
        (item, _) = drained(feeding(loader()))
    finally:
        torch.set_default_device(None)
    assert item.batch == "meta"
    (item, _) = drained(feeding(loader()))
    assert item.batch == "cpu"


def test_loader_sees_consumers_num_threads():
    def loader():
        yield torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        (item, _) = drained(feeding(loader()))
    finally:
        torch.set_num_threads(before)
    assert item.batch == before + 1


def test_loader_sees_consumers_context_variables():
    import decimal

    def loader():
        yield decimal.getcontext().prec

    with decimal.localcontext(prec=7):
        (item, _) = drained(feeding(loader()))
    assert item.batch == 7


def test_settings_changed_in_loader_do_not_reach_consumer():
    before = settings()

    def loader():
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        yield 0

    drained(feeding(loader()))
    assert settings() == before
