"""Commands of `sightline`, a file for each."""
