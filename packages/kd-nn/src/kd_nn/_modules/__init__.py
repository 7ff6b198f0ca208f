"""What users build: keyed modules, sequences and wrappers, and the plain way to run them.

Knows keys, calls and plans; must not know functional parameters or ensembles.
"""
