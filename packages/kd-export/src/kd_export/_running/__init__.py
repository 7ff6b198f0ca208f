"""Running programs and files: back-end interface, sessions, the runner on tensors.

Knows schemas and back ends; must not know modules or how a program was captured.
"""
