"""Runs kernels' PTX on the CPU, in place of a GPU: a check of what they compute.

It shows whether results are right, whether every access is to a buffer or to the block's own shared
memory, and whether all threads come to an end. It shows no time and no race: memory is sequential,
a copy or a wgmma is done at once (a TMA store as late as it may be), and fences do nothing. What
ptxas makes of the PTX is not run.

    python -m pytest -m gpu --ptx tests/gpu/test_loose_kernels.py -k 128x64     # tests of a GPU
    PYTHONPATH=tests:benchmarks python -m support.ptx SPEC M N K                # any kernel

`parse` reads the text, `decode` makes Python functions of it (`arithmetic`, `accesses`,
`matrices`, `tensor`, `gates`), `machine` runs them on `lanes` and `memory`, and `gpu` takes the
place of `support.gpu`.
"""
