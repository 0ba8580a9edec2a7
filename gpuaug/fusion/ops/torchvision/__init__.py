"""Ops with the settings, draws and conventions of torchvision's transforms, v2. One family a file, named as Kornia's."""
