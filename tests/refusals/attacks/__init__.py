"""Attacks on every public function, and on schedules: wrong values, random mutations."""
