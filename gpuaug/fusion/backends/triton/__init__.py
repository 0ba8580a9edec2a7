"""The Triton executor. No other folder imports Triton."""
