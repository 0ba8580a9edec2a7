"""Pipelines that programs have published, with the settings of the programs; sizes are arguments.

Functions that take ``transforms`` write the recipe with the classes of torchvision's transforms v1, as it was published for PIL
images, or with the classes of the same names of v2, which take tensors too. A constant in capitals names project,
commit and file.
"""
