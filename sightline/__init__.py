"""The command line `sightline`. It imports the other packages; nothing imports it."""
