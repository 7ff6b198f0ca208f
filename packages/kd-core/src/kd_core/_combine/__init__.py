"""Making one container of several.

Knows the container kinds; must not know what torch calls.
"""
