"""How long plans take to make, and what the layouts give on paper."""
