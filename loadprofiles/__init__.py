"""WHAT load: profiles and arrivals. Imports nothing of ours, no network, no clock."""
