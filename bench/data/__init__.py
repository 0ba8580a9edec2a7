"""What the suites work on: images, loaders, augmentation pipelines, networks."""
