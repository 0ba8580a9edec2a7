"""The suite of image processors, with transformers."""

import pytest
from support.bench.commands import measure_suite, rows_by_case
from support.bench.file_corpora import file_corpora

__all__ = ["file_corpora"]


@pytest.mark.frameworks
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("file_corpora")
def test_every_case_is_measured(tmp_path):
    pytest.importorskip("transformers")
    result = measure_suite("processors", tmp_path, "--files", "9", "--width", "64", "--layers", "1")
    calls = {"transformers", "gpuaug"}
    files = {"transformers, workers", "transformers, workers decode", "gpuaug", "decoding alone"}
    assert {case: set(rows) for case, rows in rows_by_case(result).items()} == {
        "Qwen2-VL": calls,
        "Qwen2-VL, from files": files,
        "SigLIP2": calls,
        "SigLIP2, from files": files,
        "training step": {"transformers, workers", "gpuaug", "resident"},
    }
