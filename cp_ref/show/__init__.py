"""Pictures of schedules, on integers, and in `cli` what both command lines print."""
