"""``gpuaug.show``: samples of a loader, drawn before and after its stages."""
