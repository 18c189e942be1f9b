"""The server's side: what it is (probe), what it says of itself (scrapes of /metrics), and what a stage did to it."""
