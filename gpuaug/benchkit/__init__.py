"""Measuring instruments and the three uses behind ``gpuaug bench``. Needs ``pip install 'gpuaug[bench]'``."""
