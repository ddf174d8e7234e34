"""The reference's API: attention, its context and its plan."""
