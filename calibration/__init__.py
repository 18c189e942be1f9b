"""THE MODEL: numbers in, numbers out. No sockets, no clock, no global random state."""
