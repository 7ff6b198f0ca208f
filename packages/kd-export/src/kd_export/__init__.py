"""From a keyed module to a verified artefact that runs anywhere."""
