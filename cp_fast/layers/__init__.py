"""Layers other than attention, one file each, on one driver (`layers`), which calls each layer's two passes."""
