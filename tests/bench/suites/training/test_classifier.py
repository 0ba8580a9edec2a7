from bench.suites.training import classifier


def test_rows_that_need_a_gpu_are_skipped_with_the_reason(capsys):
    sizes = ["--size", "32", "--batch", "2", "--width", "1", "--workers", "0", "--seconds", "0.02", "--repeats", "1"]
    flags = ["--device", "cpu", "--rows", "two streams, as published;timm PrefetchLoader;DALI"]
    made = classifier.main([*sizes, *flags])
    assert [(row["name"], row["reason"]) for row in made["settings"]["skipped"]] == [
        (name, "needs a GPU") for name in ("two streams, as published", "timm PrefetchLoader", "DALI")
    ]
    assert "timm PrefetchLoader skipped: needs a GPU" in capsys.readouterr().out
