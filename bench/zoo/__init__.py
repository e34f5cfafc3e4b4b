"""The evidence of docs/attention.md: what was measured of every system, its tables and its pictures."""
