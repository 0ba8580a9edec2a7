"""Settings of torch that a program may have changed, and what they must leave as it is, bit for bit."""

from contextlib import contextmanager

import torch


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def without_tf32():
    """Products of float32 matrices, and convolutions, in float32 on a GPU. ``monkeypatch`` cannot restore such settings."""
    settings = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [setting.allow_tf32 for setting in settings]
    for setting in settings:
        setting.allow_tf32 = False
    try:
        yield
    finally:
        for setting, allowed in zip(settings, before, strict=True):
            setting.allow_tf32 = allowed


@contextmanager
def autocast_and_default_device():
    with torch.autocast("cpu", dtype=torch.bfloat16), default_device("meta"):
        yield


SETTINGS = {
    # Together, since neither hides the other: autocast changes operations, the default device new tensors.
    "autocast and default device": autocast_and_default_device,
    "default dtype": lambda: default_dtype(torch.float64),  # alone, since autocast leaves float64 as it is
}


def difference(made, expected, way=""):
    """Where two nestings of tensors and other values differ, in a type, a device or a bit; ``""``: nowhere."""
    if isinstance(expected, torch.Tensor):
        kinds = [(type(each), each.dtype, each.device, each.shape, each.stride()) for each in (made, expected)]
        if kinds[0] != kinds[1]:
            return f"{way}: {kinds[0]} is not {kinds[1]}"
        same = torch.equal(made, expected) or torch.equal(made.nan_to_num(7.0), expected.nan_to_num(7.0))
        return "" if same else f"{way}: up to {(made.double() - expected.double()).abs().max():.3g} apart"
    if type(made) is not type(expected):
        return f"{way}: {type(made)} is not {type(expected)}"
    if isinstance(expected, list | tuple | dict):
        keys = list(expected) if isinstance(expected, dict) else range(len(expected))
        if len(made) != len(expected):
            return f"{way}: {len(made)} entries are not {len(expected)}"
        return next((found for key in keys if (found := difference(made[key], expected[key], f"{way}[{key!r}]"))), "")
    return "" if made == expected else f"{way}: {made} is not {expected}"


def check_unchanged(outcome):
    """Call ``outcome`` under each of the settings: it gives what it gives without, which is returned."""
    expected, found = outcome(), []
    for name, setting in SETTINGS.items():
        with setting():
            try:
                made = outcome()
            except Exception as error:
                found.append(f"{name}: {error!r}")
                continue
        if apart := difference(made, expected):
            found.append(f"{name}: {apart}")
    assert not found, "\n".join(found)
    return expected
