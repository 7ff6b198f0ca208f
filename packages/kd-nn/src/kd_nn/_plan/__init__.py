"""The fast path of a sequence: one program, one code generator, two kinds of plan.

Knows programs and modules of torch; must not know how users build a sequence.
"""
