"""Containers in files: what is loaded is exactly what was saved.

Tensors are in segments, which are files of safetensors; everything else is in one manifest, whose
rename is the only commit. One idea a module, from the lowest:

| module | knows |
| --- | --- |
| `files` | the calls that change or open files, without following links |
| `canonical` | the one way to write a value of JSON, and reading it without surprises |
| `values` | which data that is not a tensor is kept, and how |
| `dtypes` | under which name and shape of safetensors a dtype is stored |
| `registered` | classes and types by registered names; nothing is imported by a name of a file |
| `progress` | how far saves and checks are |
| `segments` | header, order, checksums and views of the tensors of one file |
| `manifest` | generation, segments and tree of a store, and the limits of all three |
| `encoding` | a container as nodes of a manifest |
| `appending` | which parts a tree has, and whether their rows fit |
| `decoding` | nodes of a manifest as a container |
| `commit` | lock, temporary files, renames, and what is removed afterwards |
| `joining`, `summary` | parts as one; what a store holds |
| `directory`, `single`, `arena` | the forms of a store; one that is filled in place |
| `growing` | adding entries to an arena |
| `places` | which tensors lie in an arena |
| `mapped_tensor` | one tensor in a file of its own, without a manifest |
| `foreign` | the directories of another package |
| `forms` | which form a path stands for |

Must not know operations or container kinds.
"""
