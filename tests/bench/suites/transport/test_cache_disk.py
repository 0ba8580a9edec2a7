from support.bench.commands import measure_suite


def test_rows_are_read_from_the_disk(tmp_path):
    result = measure_suite("cache_disk", tmp_path, "--count", "32", "--batch", "4")
    assert [row["name"] for row in result["rows"]] == ["disk", "cached"]
    assert all(row["gb_per_s"] > 0 and 0 <= row["cached_share"] <= 1 for row in result["rows"])
