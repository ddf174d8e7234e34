"""The cost model: machines fitted to records, and predictions compared with records."""
