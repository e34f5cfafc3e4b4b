"""The attention study of docs/attention.md: measurements of every system, and the tables and pictures made of them."""
