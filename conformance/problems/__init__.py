"""What the suite plays besides cases of attention, and how all of it is drawn.

problem                             what every kind of problem has: text, parse, play, judge
features, capabilities              what a case exercises, and what an implementation has
strategies, covering                cases that are drawn, and cases that together have every pair of features
helper_calls, helper_definitions, helpers   calls of THD helpers
tiles, linear                       tiles and merges; linear layers
malformed, named, special, known_libraries, known_frameworks, torch_uses    tables of named problems
"""
