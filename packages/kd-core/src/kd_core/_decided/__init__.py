"""Names of tensordict that are left out on purpose, and the errors that say what to write.

Knows names and texts; must not know what the names that exist do.
"""
