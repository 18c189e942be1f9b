"""From the columns of requests to what is said of a stage: window, statistics, throughput, client health. Pure."""
