"""What the commands compute that no other part of kd_export needs.

Knows schemas, sessions and what is installed; must not know how a command is called or how
its results are printed.
"""
