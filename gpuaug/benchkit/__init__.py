"""``gpuaug bench``: timed windows, and the three uses that it compares. Requires ``pip install 'gpuaug[bench]'``."""
