"""The problems that the suite plays besides cases of attention, and how all of them are drawn.

problem                             the members of every kind of problem: text, parse, play, judge
features, capabilities              the features of a case, and those of an implementation
strategies, covering                cases that are drawn, and cases that together have every pair of features
helper_calls, helper_definitions, helpers   calls of THD helpers
tiles, linear, sparse               tiles and merges; linear layers; attention to chosen keys
malformed, named, special, known_bugs, torch_uses    tables of named problems
"""
