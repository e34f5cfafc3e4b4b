"""Serves trained attention models, and shows what they attend to."""

__version__ = "0.4.0"
