"""The version, where packaging reads it."""

__version__ = "0.1.0"
