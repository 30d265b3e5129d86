"""Measurement: the four flows really run, and benchmarks that print ratios taken in one run."""
