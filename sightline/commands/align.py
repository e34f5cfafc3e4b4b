"""`sightline align`: choose the heads of a bundle that align words."""

from sightline.commands.actions import action_command
from sightline.export.options import AlignOptions

run = action_command("align", AlignOptions)
