"""The Triton executor. The only folder that imports Triton."""
