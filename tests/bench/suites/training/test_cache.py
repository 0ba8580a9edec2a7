"""The suites of the feature cache."""

import torch
from support.bench.commands import measure_suite, rows_by_case
from support.bench.file_corpora import file_corpora

from bench.suites.training import cache_accuracy

__all__ = ["file_corpora"]


def test_every_case_is_measured(file_corpora, tmp_path):
    result = measure_suite(
        "cache", tmp_path, "--cases", "latents;latents, train", "--width", "8", "--count", "4", "--size", "32"
    )
    rows = {"encoding", "recording", "cached", ".npy", "resident"}
    assert {case: set(names) - {"MDS"} for case, names in rows_by_case(result).items()} == {
        "latents": rows,
        "latents, train": rows,
    }


def test_every_number_of_views_is_trained(tmp_path, monkeypatch):
    labels = torch.arange(40) % 10
    images = torch.randint(256, (40, 1, 32, 32), dtype=torch.uint8).expand(-1, 3, -1, -1)
    monkeypatch.setattr(cache_accuracy, "digits", lambda: (images, labels))
    result = measure_suite("cache_accuracy", tmp_path, "--quick", "--images", "8")
    assert [row["name"] for row in result["rows"]] == ["fresh", "views=8", "views=4", "views=1"]
    assert all(0 <= row["top1_percent"] <= 100 for row in result["rows"])
