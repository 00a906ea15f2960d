"""Benchmarks and checks for development: `python -m benchmarks.NAME`.

They need a checkout and are not installed; what a user measures with is `qtrain/bench/`.
"""
