"""Keyed containers of tensors."""
