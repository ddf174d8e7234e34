"""Compiler passes: functions from the plan of one pass to a faster one. `cp_fast.compile.pipeline` lists them."""
