"""A cost model: predicts attention's time and memory on a machine before a run.

- machine           kernel rates, bandwidths, latencies, the host's times: data (`cp_fast.compile.machine`).
- counts            the work of a rank in each step, and its peak bytes in a call, from its program.
- predict           counts times a machine's prices; every layout and schedule; the memory of a training step.
- measure_machine   measures this machine.
"""
