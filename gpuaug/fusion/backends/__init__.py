"""Executors of a plan: torch on any device, Triton on CUDA."""
