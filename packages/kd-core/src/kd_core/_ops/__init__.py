"""The operations of a container: a concern a module, none knows another."""
