"""`conformance.step`: planted mistakes, and training steps that are right."""
