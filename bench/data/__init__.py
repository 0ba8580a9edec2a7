"""Data of the suites: images, loaders, augmentation pipelines and networks."""
