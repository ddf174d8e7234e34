"""From a problem to its schedule: p2p, all_gather, a2a and a2a+p2p."""
