"""Comparison of tensors, above all of images, whose failure says which sample is off, where and by how much."""

import torch

AXES = ("sample", "channel", "row", "column")
"""Names of the dimensions of images, (B, C, H, W). An index into other tensors is shown as it is."""


def assert_values(got, wanted, *, atol=0.0, rtol=0.0, share=0.0, equal_nan=False, draws=None, about=""):
    """Assert that two tensors are equal, or nearly so.

    Args:
        got: Tensor to be judged.
        wanted: Tensor of the same shape and dtype, on the same device.
        atol: Largest difference of two values that agree.
        rtol: Added to it for each unit of the wanted value.
        share: Share of the values that may differ by more, such as pixels at a threshold.
        equal_nan: Whether NaN agrees with NaN.
        draws: ``Draws`` of the batch. A failure then says what the sample drew.
        about: Words before the message: which of several comparisons this is.
    """
    __tracebackhide__ = True
    text = difference(got, wanted, atol=atol, rtol=rtol, share=share, equal_nan=equal_nan, draws=draws)
    if text:
        raise AssertionError(f"{about}: {text}" if about else text)


def difference(got, wanted, *, atol=0.0, rtol=0.0, share=0.0, equal_nan=False, draws=None):
    """How two tensors differ, as ``assert_values`` says it, or an empty string."""
    for name in ("shape", "dtype", "device"):
        if getattr(got, name) != getattr(wanted, name):
            return f"got the {name} {getattr(got, name)}, wanted {getattr(wanted, name)}"
    got, wanted = (each.detach().as_subclass(torch.Tensor) for each in (got, wanted))
    wrong = got != wanted
    if wrong.any() and (atol or rtol):
        wrong &= ~((got.double() - wanted.double()).abs() <= atol + rtol * wanted.double().abs())
    if equal_nan:
        wrong &= ~(got.isnan() & wanted.isnan())
    count = int(wrong.sum())
    if not count or count <= share * wrong.numel():
        return ""
    bound = f" by more than {atol:.2g}" if atol else ""
    bound += f"{' +' if atol else ' by more than'} {rtol:.2g} of the wanted value" if rtol else ""
    bound += f", {share:.1%} may" if share else ""
    return _described(got.cpu().double(), wanted.cpu().double(), wrong.cpu(), bound, draws)


def _described(got, wanted, wrong, bound, draws):
    """The place of the largest difference (NaN differs most), and how many values differ."""
    apart = (got - wanted).abs().nan_to_num(torch.inf, torch.inf).where(wrong, -1.0)
    place = tuple(int(index) for index in torch.unravel_index(apart.argmax(), apart.shape))
    where, samples = f"index {place}" if place else "the number", ""
    if len(place) == len(AXES):
        where = ", ".join(f"{axis} {index}" for axis, index in zip(AXES, place, strict=True))
        samples = f" of {int(wrong.flatten(1).any(1).sum())} of {len(wrong)} samples"
    one, other, digits = got[place].item(), wanted[place].item(), 4
    while digits < 17 and f"{one:.{digits}g}" == f"{other:.{digits}g}":
        digits += 1
    text = (
        f"{where}: got {one:.{digits}g}, wanted {other:.{digits}g} (largest difference {apart[place].item():.2g}; "
        f"{int(wrong.sum())} of {wrong.numel()} values{samples} differ{bound})"
    )
    return text + (f". Sample {place[0]} drew {_drawn(draws, place[0])}." if draws is not None and samples else "")


def _drawn(draws, sample):
    """The modules that apply to one sample, with their numbers, in words."""
    modules = []
    for name, numbers in draws.of(sample).items():
        modules.append(f"{name}({', '.join(f'{key}={value:.5g}' for key, value in numbers.items())})")
    return ", ".join(modules) or "nothing"
