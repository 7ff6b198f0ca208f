"""The operations of a container: a family a folder, a concern a module, none knows another."""
