"""Devices that tests of decoding run on: parameters of the fixture ``device`` of ``tests/decode``."""

import pytest

ON_CARD = ("engines", "hybrid")
by_each_decoder = pytest.mark.parametrize(
    "device", [pytest.param(name, marks=pytest.mark.gpu) for name in ON_CARD], indirect=True
)
on_each_device = pytest.mark.parametrize(
    "device", ["cpu", "double", *(pytest.param(name, marks=pytest.mark.gpu) for name in ON_CARD)], indirect=True
)
