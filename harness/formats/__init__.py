"""Other tools' results in and out. Definitions are mapped; what cannot be mapped is said, in the folder and aloud."""
