"""The attention study of docs/research/attention.md: measurements, tables and pictures."""
