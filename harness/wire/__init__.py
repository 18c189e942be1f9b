"""Bytes of the wire to values and back out of nothing else: no socket, no clock, no event loop enters this room."""
