"""The planners of schedules and layouts."""
