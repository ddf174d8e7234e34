"""Runs of the suite: the table of tiers, drawing, worker processes, known failures.

tiers           one `Tier` for each name of `--tier`
play_problem    from a problem's text to a verdict
processes, workers      processes of ranks; a pool that survives crashes
run_tiers, suite_run    one tier; a whole run
known_failures  failures that do not make a run fail
"""
