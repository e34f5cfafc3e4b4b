"""`sightline quantize`: quantize a bundle to 8-bit or 4-bit weights."""

from sightline.commands.actions import action_command
from sightline.export.options import QuantizeOptions

run = action_command("quantize", QuantizeOptions)
