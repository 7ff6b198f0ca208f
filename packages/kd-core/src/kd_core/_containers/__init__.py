"""The container kinds, each written on the primitives alone.

Knows how each kind stores its entries; must not know how several containers are combined.
"""
