"""Modules that run with other parameters: containers of parameters, ensembles.

Knows keyed modules; must not know plans.
"""
