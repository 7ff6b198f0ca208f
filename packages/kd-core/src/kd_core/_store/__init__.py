"""Containers in files: what is loaded is exactly what was saved.

Tensors are in segments, which are files of safetensors; everything else is in one manifest, whose
rename is the only commit. One idea a module, from the lowest:

| module | knows |
| --- | --- |
| `files` | the calls that change or open files, without following links |
| `manifest` | generation, segments and tree of a store; JSON and data in it |
| `mapped_tensor` | one tensor in a file of its own; dtypes; which tensors lie in an arena |
| `segments` | header, order, checksums and views of the tensors of one file |
| `codec` | a container as nodes of a manifest, and back; whether the rows of two fit |
| `commit` | lock, temporary files, renames; parts as one; what a store holds |
| `directory`, `single` | the forms of a store |
| `foreign`, `foreign_writing` | directories of tensordict: how they are read and written |
| `arena` | a store that is filled in place, and grows |
| `forms` | which form a path stands for |

Must not know operations or container kinds.
"""
