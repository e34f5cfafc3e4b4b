"""Exceptions that are no failures."""

import asyncio

# They end a task or the process. All others are failures of one call or one bundle, also those that
# are not subclasses of Exception: a panic of a library that is written in Rust is one.
INTERRUPTIONS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
