"""Where public names say that they are defined, and names that are left out on purpose.

Knows names and texts; must not know what the names that exist do.
"""
