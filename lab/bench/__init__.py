"""Benchmarks of Sightline. Each figure has a target or is a ratio from one run; results are in
`lab/bench/results/`.
"""
