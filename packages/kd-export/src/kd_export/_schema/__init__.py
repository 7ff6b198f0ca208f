"""What a file says: schema, wire names, test vectors, archives, trust.

Knows files and pure data; must not import torch.
"""
