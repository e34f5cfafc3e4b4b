"""`sightline pack`: store the matrices of a bundle in 8 bits."""

from sightline.commands.actions import action_command
from sightline.export.options import PackOptions

run = action_command("pack", PackOptions)
