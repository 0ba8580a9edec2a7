"""Results with invented figures."""

import torch

from gpuaug.benchkit import results

SIZES = (8, 16, 32, 64)


def sweep(suite="classifier_sizes", sizes=SIZES):
    """A result over many batch sizes; one row was left out at the largest."""
    rates = {"serial": 100.0, "workers": 40.0, "streamed": 110.0, "streamed, fused": 300.0}
    rows = [
        {
            "name": name,
            "batch_size": size,
            "steps_per_s": rate / size,
            "images_per_s": rate,
            "ratio": rate / 100.0,
            "ratio_low": rate / 110.0,
            "ratio_high": rate / 90.0,
            "rounds": [rate / size, 1.1 * rate / size],
        }
        for name, rate in rates.items()
        for size in sizes
        if name != "workers" or size < sizes[-1]
    ]
    settings = {"baseline": "serial", "ours": ["streamed", "streamed, fused"], "ceilings": []}
    return results.result(suite, rows=rows, settings=settings, device=torch.device("cpu"))
