import pytest
from support.bench.commands import TINY

from bench.suites.training import chain


def test_rows_chooses_variants_and_keeps_the_baseline(tmp_path):
    made = chain.main([*TINY, "--width", "4", "--rows", "two lanes;one lane, eager"])
    assert [row["name"] for row in made["rows"]] == ["serial", "one lane, eager", "two lanes"]
    with pytest.raises(SystemExit, match=r"--rows must be among serial; .*, got three lanes"):
        chain.main([*TINY, "--width", "4", "--rows", "three lanes"])
