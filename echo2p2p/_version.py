"""The package's version, read by the build and shown by ``echo2p2p --version``."""

__version__ = "0.1.0"
