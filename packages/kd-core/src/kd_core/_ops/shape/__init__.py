"""The batch as a shape: sizes, their order, number and names; keys and values it must not know."""
