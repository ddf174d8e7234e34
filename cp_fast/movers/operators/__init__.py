"""The registered operators that move rows, their checks and gradients."""
