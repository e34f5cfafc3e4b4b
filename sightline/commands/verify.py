"""`sightline verify`: compare a bundle with its checkpoint."""

from sightline.commands.actions import action_command
from sightline.export.options import VerifyOptions

run = action_command("verify", VerifyOptions)
