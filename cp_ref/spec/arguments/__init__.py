"""Arguments of calls: read, checked, and refused before anything is sent."""
