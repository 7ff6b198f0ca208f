"""What is given to those who run a file: programs in their language, a page, server files.

Knows schemas, sessions and files; must not know modules or how a program was captured.
"""
