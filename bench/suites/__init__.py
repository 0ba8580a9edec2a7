"""Benchmark suites: one module per suite. The result of a suite is ``bench/results/NAME.json``."""

# Few and short rounds, since seven batch sizes are measured. Slow rows are left out at the largest sizes, where such a short
# window would only measure batches that had queued up before.
_SIZES = ["--batch", "8,16,32,64,128,256,512", "--seconds", "0.3", "--repeats", "2", "--slowest", "0.15"]

SUITES: dict[str, tuple[str, list[str]]] = {
    "encoder_decoder": ("bench.suites.training.encoder_decoder", []),
    "encoder_decoder_sizes": (
        "bench.suites.training.encoder_decoder",
        ["--suite", "encoder_decoder_sizes", "--rows", "two streams, as published;timm PrefetchLoader;streamed", *_SIZES],
    ),
    "encoder_decoder_resident": ("bench.suites.training.encoder_decoder", ["--resident"]),
    "encoder_decoder_alike": (
        "bench.suites.training.encoder_decoder",
        ["--alike", "--batch", "8,16,64", "--seconds", "0.25", "--repeats", "5"],
    ),
    "frozen_resnet": ("bench.suites.training.frozen_resnet", []),
    "classifier": ("bench.suites.training.classifier", []),
    "classifier_sizes": (
        "bench.suites.training.classifier",
        [
            "--suite",
            "classifier_sizes",
            "--rows",
            "workers;two streams, as published;timm PrefetchLoader;DALI;streamed;streamed, fused",
            *_SIZES,
        ],
    ),
    "resnet_step": ("bench.suites.training.resnet_step", []),
    "launch_bound": ("bench.suites.training.launch_bound", []),
    "chain": ("bench.suites.training.chain", []),
    "branches": ("bench.suites.training.branches", []),
    "latents": ("bench.suites.training.latents", []),
    "cache": ("bench.suites.training.cache", []),
    "cache_accuracy": ("bench.suites.training.cache_accuracy", []),
    "processors": ("bench.suites.training.processors", []),
    "cache_disk": ("bench.suites.transport.cache_disk", []),
    "handover": ("bench.suites.transport.handover", []),
    "lifetimes": ("bench.suites.transport.lifetimes", []),
    "items": ("bench.suites.training.items", []),
    "feeds": ("bench.suites.transport.feeds", []),
    "files": ("bench.suites.transport.files", []),
    "bucket": ("bench.suites.transport.bucket", []),
    "clips_files": ("bench.suites.transport.clips_files", []),
    "augment": ("bench.suites.augmentation.augment", []),
    "augment_presets": (
        "bench.suites.augmentation.augment",
        ["--cases", "hflip,lsj,ssd,segmentation", "--batch", "64", "--repeats", "2"],
    ),
    "recipes": ("bench.suites.augmentation.recipes", []),
    "ragged": ("bench.suites.augmentation.ragged", []),
    "views": ("bench.suites.augmentation.views", []),
    "clips": ("bench.suites.augmentation.clips", []),
    "detection": ("bench.suites.augmentation.detection", []),
    "mosaics": ("bench.suites.augmentation.mosaics", []),
    "modules": ("bench.suites.augmentation.modules", []),
    "accuracy": ("bench.suites.augmentation.accuracy", []),
    "waits": ("bench.suites.training.waits", []),
    "priorities": ("bench.suites.training.priorities", []),
    "profiles": ("bench.suites.training.profiles", []),
}
"""Name of a suite: (its module, flags for that module). ``python -m bench run`` measures these suites."""
