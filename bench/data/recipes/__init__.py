"""Published augmentation recipes, with the settings of their programs; sizes are arguments.

Functions with a parameter ``transforms`` build the recipe from torchvision's transforms v1, as published for PIL images, or
from the classes of the same names in v2, which also take tensors. A constant in capitals has the source: project, commit, file.
"""
