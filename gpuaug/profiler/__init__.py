"""``gpuaug.profile``: times of the parts of a training step, and the bound of the loop."""
