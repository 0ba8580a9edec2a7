"""Ops of torchvision's transforms. A file with the name of a file in ``ops`` has the equivalent ops."""
