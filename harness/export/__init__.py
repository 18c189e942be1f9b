"""What a run shows to others while it runs and after: Prometheus metrics, the report."""
