"""The error of this stage."""


class CubinError(RuntimeError):
    """A kernel could not be found, compiled or loaded; the message names it and the way out."""
