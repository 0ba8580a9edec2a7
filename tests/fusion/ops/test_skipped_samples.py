"""A sample that an op skips comes out bit for bit as it went in, whatever its pixels are."""

import pytest
from support.ops.skipped import ANTIALIASED, SKIPPING, fault


@pytest.mark.parametrize("name", SKIPPING)
def test_skipped_samples_keep_every_bit(name):
    assert not fault(SKIPPING[name])


@pytest.mark.parametrize("name", ANTIALIASED)
def test_antialias_leaves_every_bit_of_skipped_samples(name):
    assert not fault(ANTIALIASED[name], antialias=True)
