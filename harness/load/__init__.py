"""WHEN it is asked: stages, users, worker processes. Lateness is kept, never overwritten."""
