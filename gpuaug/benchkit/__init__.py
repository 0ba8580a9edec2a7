"""Measurement tools and the three uses of ``gpuaug bench``. Requires ``pip install 'gpuaug[bench]'``."""
