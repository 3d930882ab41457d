"""Tests on GPUs with NCCL, marked `gpu`, from 1 to 8 ranks; each also runs on CPUs with Gloo.

    pytest -m gpu tests/gpu                         on the GPUs that there are; the others are skipped
    pytest -m gpu tests/gpu --gpu-tests-on cpu      to try the tests themselves

`benchmarks/gpu/run.py` runs them one by one.
"""
