"""The compiler passes, each against brute force or the plan without it."""
