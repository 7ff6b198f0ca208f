"""What a file says: schema, wire names, test vectors, archives, what a file may hold.

Knows files and pure data; must not import torch.
"""
