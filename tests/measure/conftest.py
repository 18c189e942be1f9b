"""Properties are checked by what holds, not by how fast this machine happens to be."""

from hypothesis import settings

settings.register_profile("measure", deadline=None)
settings.load_profile("measure")
