"""Lowering: a rank's schedule becomes an executable plan that is right and slow."""
