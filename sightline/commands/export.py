"""`sightline export`: export a training run, or import a model of others, as a bundle."""

from sightline.commands.actions import action_command
from sightline.export.options import CheckpointOptions

run = action_command("export", CheckpointOptions)
