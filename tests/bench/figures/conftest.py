import pytest
import torch

from gpuaug.benchkit import results


@pytest.fixture
def measured(tmp_path):
    """A folder with two results: rates of loops, and times."""
    rows = [
        {"name": name, "batch_size": batch_size, "steps_per_s": rate, "ratio": rate / 100.0, "rounds": [rate, rate + 1]}
        for batch_size in (8, 32)
        for name, rate in (("serial", 100.0), ("streamed", 131.4), ("resident", 150.0))
    ]
    settings = {"baseline": "serial", "ours": ["streamed"], "ceilings": ["resident"], "workers": 4}
    result = results.result("encoder_decoder", rows=rows, settings=settings, device=torch.device("cpu"))
    flat = [
        {"case": "short", "name": policy, "step_ms": 1.25, "peak_reserved_bytes": 512_000_000, "wrong": 0}
        for policy in ("record_stream", "reverse waits")
    ]
    folder = tmp_path / "results"
    results.write(folder / "encoder_decoder.json", result)
    results.write(folder / "lifetimes.json", results.result("lifetimes", rows=flat, settings={}, device=torch.device("cpu")))
    return folder
