"""Experiments on the package, each a script on the harness of foretoken.measure; no part of the wheel.

`python -m benchmarks` lists them, `python -m benchmarks NAME --help` explains one.
"""
