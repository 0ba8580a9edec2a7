"""Data of the suites: images, loaders, augmentation pipelines, networks."""
