"""Errors of drills. They stop the command with exit code 2: nothing was found out."""

from loraplex.platform.startup_errors import StartError


class DrillImpossible(StartError):
    """The drill could not be run here, or was not allowed to. No fault is left."""

    exit_code = 2
