"""The schedule that runs: `cp_ref.spec` plans it, with parameters that are chosen by a machine's numbers."""
