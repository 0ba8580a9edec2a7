import pytest
from support.bench.commands import TINY

from bench.suites.transport import lifetimes


def test_lifetimes_is_skipped_without_a_gpu(capsys):
    assert lifetimes.main([*TINY]) is None
    assert "skipped" in capsys.readouterr().out


@pytest.mark.gpu
def test_lifetimes_finds_no_wrong_pixel():
    made = lifetimes.main(["--device", "cuda", "--size", "64", "--batch", "4", "--seconds", "0.1"])
    assert [row["wrong"] for row in made["rows"]] == [0] * 12
