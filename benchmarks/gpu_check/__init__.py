"""One script that checks and measures everything a GPU brings: `python -m benchmarks.gpu_check`, or `make gpu-check`.

    __main__    arguments, results, exit status          no torch
    conductor   runs the parts in worker processes       no torch
    report      rows, table, JSON                        no torch
    wheels      brings packages that a machine lacks     no torch
    worker      runs parts and prints their rows as JSON lines
    device      what differs between CUDA and a CPU: clocks, graphs, copies
    sizes       how large everything is
    oracle, attention_speed, copying, tiers, graphs      the parts
    random_model                                         a model of given shape, made in memory

Nothing needs a network. On a CPU the same code runs with small sizes, the kernels in Triton's interpreter.
"""
