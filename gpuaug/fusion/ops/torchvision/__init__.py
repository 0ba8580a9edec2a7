"""Ops of torchvision's transforms. Each file is named after the file in ``ops`` with the ops of Kornia's equivalent modules."""
