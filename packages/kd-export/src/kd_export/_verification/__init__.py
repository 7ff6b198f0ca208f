"""Trying a program and judging what it gives: sizes, inputs, comparisons, reports.

Knows schemas and sessions; must not know files, formats, modules or how a program was captured.
"""
