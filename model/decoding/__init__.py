"""Reference decoding: slow, simple implementations that every faster decoder is compared with."""
