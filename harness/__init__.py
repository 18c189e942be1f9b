"""THE WORLD: sockets, processes, clocks, files, terminals."""
