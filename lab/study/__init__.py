"""The attention study of lab/docs/attention-study.md: measurements, tables and pictures."""
