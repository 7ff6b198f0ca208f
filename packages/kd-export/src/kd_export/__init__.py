"""From a keyed module to a verified artefact that runs anywhere."""

__version__ = "0.1.0"
