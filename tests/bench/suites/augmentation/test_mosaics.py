"""The suite of mosaics."""

import pytest
from support.bench.commands import measure_suite, rows_by_case
from support.bench.file_corpora import file_corpora

__all__ = ["file_corpora"]


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("file_corpora")
def test_every_case_is_measured(tmp_path):
    result = measure_suite("mosaics", tmp_path, "--files", "9", "--side", "32")
    assert {case: set(rows) for case, rows in rows_by_case(result).items()} == {
        "images": {"Kornia", "gpuaug"},
        "with boxes": {"gpuaug", "gpuaug, as a stage"},
        "from files": {"workers", "gpuaug", "decoding alone"},
    }
