"""The page: sizing, runs, a ramp to watch. It serves what :mod:`calibration` computes and computes nothing itself."""
