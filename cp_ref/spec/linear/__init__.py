"""Linear layers on integers: fragments of documents, the messages of their states, and halos of convolutions.

A linear layer carries a state from token to token of a document. The rows of a fragment act on it as one affine map,
`S -> M S + B`, whatever their number. So a rank sends the maps of its fragments to the ranks that hold later fragments
of the document. Each of those composes the maps in the order of the document, and has the state that enters its own
fragments. In the backward pass the state's gradient goes the other way, by maps of the same form.
"""
