"""What is an entry of a container, and who builds one.

Knows the protocol of a node, and container kinds by role; must not know what a container does.
"""
