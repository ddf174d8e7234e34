"""Masks as users give them."""
