"""Attention kernel libraries behind one interface (`backend_protocol.Backend`); `choose_backend` has their order."""
