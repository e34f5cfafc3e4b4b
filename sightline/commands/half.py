"""`sightline half`: convert a bundle to float16 for CUDA."""

from sightline.commands.actions import action_command
from sightline.export.options import HalfOptions

run = action_command("half", HalfOptions)
