"""Lowering: translation of the user's modules of Kornia and torchvision to ops."""
