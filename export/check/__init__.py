"""Checks of a written bundle, and what they need to run its graphs."""
