"""Containers between the processes of a group of `torch.distributed`.

Knows messages: one for each dtype and device, after all ranks agreed on keys, shapes and dtypes.
Must not know operations or container kinds.
"""
