"""WHAT is asked of the server: prompts, lengths, request bodies."""
