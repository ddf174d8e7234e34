"""Schedules that no planner makes."""
