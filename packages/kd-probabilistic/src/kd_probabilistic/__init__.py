"""Keyed modules that build distributions and draw from them."""
