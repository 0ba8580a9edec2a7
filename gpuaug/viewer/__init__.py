"""``gpuaug.show``: draws samples of a loader before and after its stages (transforms on the device)."""
