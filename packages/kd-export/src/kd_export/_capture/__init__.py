"""From a keyed module to an exported program.

Knows keyed modules and torch.export; must not know file formats.
"""
