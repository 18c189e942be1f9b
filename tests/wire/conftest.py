from hypothesis import settings

# examples are cheap, the machine may be busy: a slow one is no failure
settings.register_profile("wire", deadline=None)
settings.load_profile("wire")
