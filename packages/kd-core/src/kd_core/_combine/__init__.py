"""Functions that combine several containers into one.

Knows the container kinds; must not know how torch calls these functions.
"""
