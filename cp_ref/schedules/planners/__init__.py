"""Planners: from a workload to the steps of one rank, one module for each `cp_comm_type`."""
