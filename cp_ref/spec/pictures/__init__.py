"""Pictures of tables and schedules, as text and as SVG."""
