"""Translation of whole documents: everything comes back, in its place."""
